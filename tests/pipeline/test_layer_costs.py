"""Costs of calls: plausible times, exact bytes, and a model that stays as it was."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pipeline.models import nested, sequential, skipping, tied, two_in_two_out
from tfdml.memory.checkpointing import best_blocks
from tfdml.memory.sized_step import steps_by_rows
from tfdml.memory.tables import LargeTables
from tfdml.pipeline import layer_costs as module
from tfdml.pipeline.layer_costs import layer_costs
from tfdml.pipeline.layer_graph import LayerGraph
from tfdml.tensor_memory.graph_nodes import nbytes_of

layers = keras.layers
ROWS = 4


def _by_name(model, rows=ROWS):
    graph = LayerGraph(model)
    return dict(zip(graph.names, layer_costs(graph, rows), strict=True))


def _wide(width=1024, rows=512):
    """Returns the costs of a model with a large and a small layer."""
    inputs = keras.Input((width,))
    x = layers.Dense(width, name="large")(inputs)
    x = layers.Dense(16, name="small")(x)
    return _by_name(keras.Model(inputs, layers.Activation("relu", name="relu")(x)), rows)


def test_times_are_those_of_the_layers():
    costs = _wide()
    large, small = (costs[name].forward + costs[name].backward for name in ("large", "small"))
    # 64 times the operations; other processes may use the processor meanwhile.
    assert large > 4 * small
    # 4 x 512 x 1024 x 1024 operations: no processor makes them in 10 us or needs 10 s.
    assert 1e-5 < large < 10


def test_bytes_of_layers():
    costs = _by_name(sequential())
    dense, _dropout, norm, last = costs.values()
    assert dense.weight_bytes == 4 * (3 * 4 + 4)
    assert norm.weight_bytes == 4 * 4 * 4
    assert last.weight_bytes == 4 * (4 * 2 + 2)
    assert [c.output_bytes for c in costs.values()] == [(16.0,), (16.0,), (16.0,), (8.0,)]


def test_each_output_has_its_bytes():
    inputs = keras.Input((6,))
    left, right = keras.ops.split(inputs, [2], axis=-1)
    costs = layer_costs(LayerGraph(keras.Model(inputs, [left, right])), ROWS)
    assert costs[0].output_bytes == (8.0, 16.0)


def test_rows_may_become_part_of_another_size():
    inputs = keras.Input((6, 2))
    x = keras.ops.reshape(inputs, (-1, 2))
    (_, dense) = layer_costs(LayerGraph(keras.Model(inputs, layers.Dense(3)(x))), ROWS)
    assert dense.output_bytes == (6 * 3 * 4.0,)


def test_weights_belong_to_the_first_call_that_uses_them():
    graph = LayerGraph(tied())
    weights = [cost.weight_bytes for cost in layer_costs(graph, ROWS)]
    assert graph.names == ["embed", "shared", "relu", "shared", "head"]
    assert weights == [4 * 7 * 4, 4 * (4 * 4 + 4), 0, 0, 0]


def test_no_backward_pass_where_nothing_is_trained():
    inputs = keras.Input((32,), name="x")
    frozen = layers.Dense(32, name="frozen", trainable=False)
    x = layers.Activation("relu", name="before")(frozen(inputs))
    x = layers.Dense(32, name="trained")(x)
    frozen_after = layers.Dense(32, name="after", trainable=False)(x)
    costs = _by_name(keras.Model(inputs, frozen_after))
    assert costs["frozen"].backward == costs["before"].backward == 0
    assert costs["frozen"].kept_bytes == 0
    # The input of the first layer with weights is kept; that of a frozen one is not needed.
    assert costs["before"].kept_bytes == 32 * 4
    assert costs["trained"].kept_bytes == 0


def test_kept_tensors_by_hand():
    inputs = keras.Input((8,), name="x")
    x = layers.Dense(16, name="first")(inputs)
    x = layers.Activation("relu", name="relu")(x)
    # A view of the same memory, which the layer after it reads again.
    x = layers.Reshape((4, 4), name="reshape")(x)
    x = layers.Add(name="add")([layers.Dense(4, name="second")(x), x])
    costs = _by_name(keras.Model(inputs, layers.Dense(1, name="last")(x)))
    kept = {name: cost.kept_bytes for name, cost in costs.items()}
    assert kept == {
        "first": 8 * 4,  # The model's input.
        "relu": 16 * 4,  # Its output, once: the next layer reads the same memory.
        "reshape": 0,
        "second": 0,
        "add": 16 * 4,
        "last": 0,
    }


def _transformer(depth, width, length, heads=2, words=50):
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])
    return keras.Model(tokens, layers.Dense(1)(x))


def test_kept_tensors_are_those_of_a_whole_step():
    model = _transformer(2, 64, 32)
    model.compile("sgd", "mse")
    step = steps_by_rows(model, None, LargeTables(), ROWS, ROWS)(ROWS)
    whole = best_blocks(step.nodes).kept
    by_calls = ROWS * sum(cost.kept_bytes for cost in layer_costs(LayerGraph(model), ROWS))
    # The loss keeps one number for each number of the output.
    assert 0 <= whole - by_calls <= 3 * 4 * ROWS * 32


class Counting(layers.Layer):
    """Has state of every kind: of Keras, of TensorFlow, a loss, a metric and a seed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.plain = tf.Variable(0.0, trainable=False)
        self.seen = keras.metrics.Mean()
        self.inner = layers.Dropout(0.5)

    def call(self, x):
        self.count.assign_add(1.0)
        self.plain.assign_add(1.0)
        self.seen.update_state(x)
        self.add_loss(keras.ops.sum(x))
        return self.inner(x)


def _state(model):
    counting = [layer for layer in model.layers if isinstance(layer, Counting)]
    others = [v for layer in counting for v in (layer.plain, *layer.seen.variables)]
    return [keras.ops.convert_to_numpy(v) for v in (*model.variables, *others)]


def test_nothing_of_the_model_changes():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.BatchNormalization(),
            layers.GaussianNoise(0.3),
            Counting(),
            layers.Dense(2, activity_regularizer="l2"),
        ]
    )
    before = _state(model)
    # Of BatchNormalization, GaussianNoise, Counting's count and seed, Dense; of Counting the rest.
    assert len(before) == 4 + 1 + 2 + 2 + 3
    losses, nodes = len(model.losses), [len(layer._inbound_nodes) for layer in model.layers]
    tf.random.set_seed(3)
    expected = [tf.random.normal(()).numpy(), tf.random.normal(()).numpy()]
    tf.random.set_seed(3)
    drawn = [tf.random.normal(()).numpy()]
    layer_costs(LayerGraph(model), ROWS)
    drawn.append(tf.random.normal(()).numpy())
    for was, now in zip(before, _state(model), strict=True):
        np.testing.assert_array_equal(was, now)
    assert len(model.losses) == losses
    assert [len(layer._inbound_nodes) for layer in model.layers] == nodes
    assert drawn == expected


def test_layers_run_in_training():
    class Sums(layers.Layer):
        def call(self, x, training=None):
            return keras.ops.repeat(x, 8 if training else 1, axis=-1)

        def compute_output_shape(self, shape):
            return shape

    class Outer(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.sums = Sums()

        def call(self, x):
            return self.sums(x)

    model = keras.Sequential([keras.Input((2,)), Outer()])
    (cost,) = layer_costs(LayerGraph(model), ROWS)
    assert cost.output_bytes == (2 * 8 * 4.0,)


@pytest.mark.parametrize("build", [sequential, skipping, tied, two_in_two_out, nested])
def test_models_of_all_kinds_are_measured(build):
    graph = LayerGraph(build())
    costs = layer_costs(graph, ROWS)
    assert len(costs) == len(graph.calls)
    assert all(cost.forward >= 0 and cost.backward >= 0 for cost in costs)
    weights = sum(map(nbytes_of, graph.variables(0, len(graph.calls))))
    assert sum(cost.weight_bytes for cost in costs) == weights


def test_a_model_of_a_strategy_is_measured():
    import tfdml

    with tfdml.MirroredStrategy(["CPU:0"]).scope():
        model = sequential()
        before = _state(model)
        costs = layer_costs(LayerGraph(model), ROWS)
    assert costs[0].kept_bytes == 3 * 4
    for was, now in zip(before, _state(model), strict=True):
        np.testing.assert_array_equal(was, now)


def test_layers_are_measured_while_a_step_is_traced():
    graph = LayerGraph(sequential())
    costs = []

    @tf.function
    def step():
        with tf.GradientTape():
            costs.append(layer_costs(graph, ROWS))

    step()
    kept = [cost.kept_bytes for cost in costs[0]]
    assert kept == [cost.kept_bytes for cost in layer_costs(graph, ROWS)]
    assert kept[0] == 3 * 4


def test_half_precision():
    dtype = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, dtype=dtype), layers.Dense(1)])
    first, last = layer_costs(LayerGraph(model), ROWS)
    assert first.output_bytes == (8.0,)
    assert last.output_bytes == (4.0,)


def test_equal_calls_are_measured_once(monkeypatch):
    measured = []

    def noted(call, *arguments):
        measured.append(call.operation.name)
        return original(call, *arguments)

    original = module.measure_call
    monkeypatch.setattr(module, "measure_call", noted)
    graph = LayerGraph(_transformer(4, 16, 8))
    begin = time.perf_counter()
    costs = layer_costs(graph, ROWS)
    assert time.perf_counter() - begin < 30
    assert len(costs) == 1 + 4 * 8 + 1
    # Embedding, head, and the layers of a block: both norms and both additions are alike.
    assert len(measured) == 2 + 6
    blocks = [costs[1 + 8 * n : 9 + 8 * n] for n in range(4)]
    assert blocks[1] == blocks[2] == blocks[3]


class Power(layers.Layer):
    def call(self, x, exponent=2):
        return x**exponent


class Wrapping(layers.Layer):
    """Has a layer inside, of which its config says nothing."""

    def __init__(self, frozen=False):
        super().__init__()
        self.inner = layers.Dense(4)
        self.inner.trainable = not frozen

    def get_config(self):
        return {}

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    "pair",
    [
        lambda: (Wrapping(), Wrapping(frozen=True)),
        lambda: (Power(), lambda x: Power()(x, exponent=3)),
        lambda: (layers.Dense(4), layers.Dense(4, activation="gelu")),
        lambda: (layers.Dense(4), layers.Dense(4, trainable=False)),
        lambda: (layers.Dropout(0.1), layers.Dropout(0.2)),
        lambda: (layers.Lambda(lambda x: x), layers.Lambda(lambda x: x + 1)),
    ],
)
def test_calls_that_differ_are_measured_each(monkeypatch, pair):
    measured = []

    def noted(*arguments):
        measured.append(arguments)
        return original(*arguments)

    original = module.measure_call
    monkeypatch.setattr(module, "measure_call", noted)
    inputs = keras.Input((4,))
    first, second = pair()
    model = keras.Model(inputs, second(first(layers.Dense(4)(inputs))))
    layer_costs(LayerGraph(model), ROWS)
    assert len(measured) == 3


def test_unknown_sizes_are_refused():
    inputs = keras.Input((None, 4), name="words")
    graph = LayerGraph(keras.Model(inputs, layers.Dense(2)(inputs)))
    with pytest.raises(ValueError, match=r"the input 'words' of the shape \(None, None, 4\)"):
        layer_costs(graph, ROWS)


def test_a_layer_that_fails_is_named():
    class Failing(layers.Layer):
        def call(self, x):
            if x.shape[0] is not None:
                raise ValueError("no")
            return x

    inputs = keras.Input((4,))
    graph = LayerGraph(keras.Model(inputs, Failing(name="bad")(inputs)))
    with pytest.raises(ValueError, match="(?s)'bad', which fails on .*no.*Pass `stages`"):
        layer_costs(graph, ROWS)
