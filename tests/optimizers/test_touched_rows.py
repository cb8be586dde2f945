"""Checks optimizers of embedding tables: which rows they change, by how much, and at what cost."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers import numpy_optimizers as reference
from tfdml.optimizers import LazyAdam, RowWiseAdagrad

ROWS, WIDTH, STEPS = 7, 3, 4
# A float32, in which Keras keeps it.
RATE = 0.125
BOTH = pytest.mark.parametrize("make", [RowWiseAdagrad, LazyAdam], ids=["row_wise", "lazy"])


def table(dtype="float64", value=None) -> keras.Variable:
    start = np.random.default_rng(0).normal(size=(ROWS, WIDTH)) if value is None else value
    return keras.Variable(start, dtype=dtype, name="embeddings")


def lookups(steps=STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the looked-up rows of each step, some of them twice, and their gradients."""
    rng = np.random.default_rng(1)
    rows = [[1, 3, 1, 5], [3, 3], [0, 5, 1], [2, 5, 5, 5]][:steps]
    return [(np.array(r), rng.normal(size=(len(r), WIDTH))) for r in rows]


def sparse(rows, values, dtype="float64") -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values, dtype), tf.constant(rows), [ROWS, WIDTH])


def summed(rows, values) -> np.ndarray:
    """Returns the dense gradient."""
    whole = np.zeros((ROWS, WIDTH))
    np.add.at(whole, rows, values)
    return whole


def trained(optimizer, variable, steps) -> np.ndarray:
    for rows, values in steps:
        optimizer.apply([sparse(rows, values, variable.dtype)], [variable])
    return variable.numpy()


def test_row_wise_adagrad_by_its_formula():
    variable, optimizer = table(), RowWiseAdagrad(RATE, 0.25, 1e-3)
    wanted = reference.row_wise_adagrad(
        variable.numpy(), [summed(*step) for step in lookups()], RATE, 0.25, 1e-3
    )
    np.testing.assert_allclose(trained(optimizer, variable, lookups()), wanted, rtol=1e-13)


def test_golden_values_of_row_wise_adagrad():
    """Row 0 has gradients (3, 4) and (0, 5), both of mean square 12.5; row 1 has none."""
    variable = table(value=[[1.0, 1.0], [2.0, 2.0]])
    optimizer = RowWiseAdagrad(0.5)
    for gradient in ([3.0, 4.0], [0.0, 5.0]):
        slices = tf.IndexedSlices(tf.constant([gradient], tf.float64), tf.constant([0]), [2, 2])
        optimizer.apply([slices], [variable])
    root = 12.5**0.5
    golden = [1 - 0.5 * 3 / root, 1 - 0.5 * 4 / root - 0.5 * 5 / 5]
    np.testing.assert_allclose(variable.numpy(), [golden, [2.0, 2.0]], rtol=1e-9)
    np.testing.assert_allclose(optimizer.variables[-1].numpy(), [25.0, 0.0], rtol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_lazy_adam_by_its_formula(amsgrad):
    variable, optimizer = table(), LazyAdam(RATE, 0.75, 0.875, 1e-3, amsgrad)
    wanted = reference.lazy_adam(
        variable.numpy(),
        [(r, summed(r, v)) for r, v in lookups()],
        RATE,
        0.75,
        0.875,
        1e-3,
        amsgrad,
    )
    np.testing.assert_allclose(trained(optimizer, variable, lookups()), wanted, rtol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_lazy_adam_is_adam_where_all_rows_have_gradients(is_sparse, amsgrad):
    rng = np.random.default_rng(2)
    ours, plain = table(), table()
    lazy, adam = (kind(0.1, amsgrad=amsgrad) for kind in (LazyAdam, keras.optimizers.Adam))
    for _ in range(STEPS):
        values = rng.normal(size=(ROWS, WIDTH))
        dense = tf.constant(values)
        lazy.apply([sparse(np.arange(ROWS), values) if is_sparse else dense], [ours])
        adam.apply([dense], [plain])
    np.testing.assert_allclose(ours.numpy(), plain.numpy(), rtol=1e-13)


def test_row_wise_adagrad_has_one_rule_for_sparse_and_dense_gradients():
    first, second = table(), table()
    a, b = RowWiseAdagrad(0.1), RowWiseAdagrad(0.1)
    for rows, values in lookups():
        a.apply([sparse(rows, values)], [first])
        b.apply([tf.constant(summed(rows, values))], [second])
    np.testing.assert_allclose(first.numpy(), second.numpy(), rtol=1e-13)


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, *({name: 0.1} for name in ("weight_decay", "global_clipnorm", "clipvalue", "clipnorm"))],
    ids=lambda o: "+".join(o),
)
def test_other_rows_rest(make, options):
    """Their weights and slots keep their bits."""
    variable, optimizer = table("float32"), make(0.1, **options)
    trained(optimizer, variable, lookups(3))
    before = [v.numpy() for v in [variable, *optimizer.variables[2:]]]
    trained(optimizer, variable, lookups()[3:])
    touched = np.isin(np.arange(ROWS), [2, 5])
    after = [v.numpy() for v in [variable, *optimizer.variables[2:]]]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[~touched], old[~touched])
        assert np.all(new[touched] != old[touched])


@BOTH
def test_weight_decay_of_looked_up_rows(make):
    """As in Keras, weights decay before they are updated, by the rate times the decay."""
    variable, plain = table(), table()
    trained(make(RATE, weight_decay=0.2), variable, lookups(1))
    rows = np.unique(lookups(1)[0][0])
    start = plain.numpy()
    start[rows] *= 1 - RATE * 0.2
    plain.assign(start)
    trained(make(RATE), plain, lookups(1))
    np.testing.assert_allclose(variable.numpy(), plain.numpy(), rtol=1e-13)


@BOTH
def test_excluded_variables_do_not_decay(make):
    results = []
    for excludes in (True, False):
        variable = table()
        optimizer = make(RATE, weight_decay=0.2)
        if excludes:
            optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        results.append(trained(optimizer, variable, lookups(1)))
    plain = trained(make(RATE), table(), lookups(1))
    np.testing.assert_array_equal(results[0], plain)
    assert np.any(results[1] != plain)


@pytest.mark.parametrize(
    ("shape", "dtype", "slot", "slot_dtype"),
    [
        ((ROWS, WIDTH), "float32", (ROWS,), "float32"),
        ((ROWS, WIDTH), "bfloat16", (ROWS,), "float32"),
        ((ROWS, WIDTH), "float64", (ROWS,), "float64"),
        ((5,), "float32", (5,), "float32"),
        ((3, 3, 2, 4), "float32", (3, 3, 2, 4), "float32"),
        ((), "float32", (), "float32"),
    ],
)
def test_accumulators_of_row_wise_adagrad(shape, dtype, slot, slot_dtype):
    optimizer = RowWiseAdagrad(0.1)
    optimizer.build([keras.Variable(np.zeros(shape), dtype=dtype, name="v")])
    accumulator = optimizer.variables[-1]
    assert (tuple(accumulator.shape), accumulator.dtype) == (slot, slot_dtype)
    assert tuple(accumulator.value.shape) == slot


def test_half_precision():
    variable, wide = table("bfloat16"), table("float32")
    wide.assign(variable.numpy().astype("float32"))
    found = trained(RowWiseAdagrad(RATE), variable, lookups()).astype("float32")
    np.testing.assert_allclose(found, trained(RowWiseAdagrad(RATE), wide, lookups()), atol=0.03)


@BOTH
def test_tensorflow_variables(make):
    """Loops of one's own may have variables of TensorFlow."""
    raw, variable = tf.Variable(table().numpy()), table()
    optimizer = make(RATE)
    for rows, values in lookups():
        optimizer.apply_gradients([(sparse(rows, values), raw)])
    np.testing.assert_array_equal(raw.numpy(), trained(make(RATE), variable, lookups()))


@BOTH
@pytest.mark.parametrize("options", [{}, {"clipnorm": 1.0}, {"weight_decay": 0.1}])
def test_no_operation_reads_or_writes_the_whole_table(make, options):
    """So a step does not cost more if the table has more rows."""
    rows = 1_000_003
    variable, optimizer = (
        keras.Variable(np.zeros((rows, 2)), name="embeddings"),
        make(0.1, **options),
    )
    optimizer.build([variable])

    @tf.function
    def step(values, ids):
        optimizer.apply([tf.IndexedSlices(values, ids, tf.constant([rows, 2]))], [variable])

    graph = step.get_concrete_function(
        tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)
    ).graph
    large = [
        op.name
        for op in graph.get_operations()
        for tensor in op.outputs
        if tensor.shape.rank and tensor.shape[0] == rows
    ]
    assert not large
    kinds = {op.type for op in graph.get_operations()}
    assert {"ResourceGather", "ResourceScatterSub"} <= kinds


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (RowWiseAdagrad, {"epsilon": 0.0}, "`epsilon` must be positive"),
        (RowWiseAdagrad, {"initial_accumulator_value": -1.0}, "must not be negative"),
        (LazyAdam, {"gradient_accumulation_steps": 2}, "accumulated gradients are dense"),
    ],
)
def test_wrong_arguments(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)
