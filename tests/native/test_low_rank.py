"""Checks the compiled stages of PowerSGD against TensorFlow's operations."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.harness import rank_job
from tests.native.test_stages import SEED, assert_same, numbers, ones
from tfdml import native
from tfdml.collectives.aggregator import StepGradients
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.compression import QSGD, PowerSGD
from tfdml.compression.codecs.power_sgd import orthogonal
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.native_rounds import NativeRounds, operations
from tfdml.compression.exchange.rounds import compiled_stages, sum_in_rounds

# More rows than one partial sum has; a number of columns that is not a multiple of the tile's.
SHAPES = ((600, 53), (64, 40), (3, 3, 16, 29))


def close(ours: list[tf.Tensor], others: list[tf.Tensor]) -> None:
    """Compares sums computed in a different order."""
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("rank", "size"),
    [(1, 2), (4, 3), (6, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((2, 3), (4, 1)))],
)
def test_factors_match_up_to_rounding_and_products_bit_for_bit(rank, size):
    codec, rng = PowerSGD(rank), np.random.default_rng(rank)
    library = NativeRounds(native.load(), size)
    begin, (between,), end = compiled_stages(codec, size)
    for scale, memory_scale in ((1.0, 1.0), (1.0, 0.7), (1024.0, 0.7), (3.0, 1.0)):
        scale, memory_scale = tf.constant(scale), tf.constant(memory_scale)
        gradients = [numbers(rng, shape) for shape in SHAPES]
        memories = [{"residual": numbers(rng, shape)} for shape in SHAPES]
        states = [codec.init(str(i), shape) for i, shape in enumerate(SHAPES)]
        values, middles, lefts, nothing = begin(gradients, memories, states, scale, memory_scale)
        ours, no_middles, lefts_too, _ = library.begin(
            gradients, memories, states, scale, memory_scale
        )
        assert no_middles == [dict(m) for m in middles] == [{}] * len(SHAPES)
        for one, other in zip(ours, values, strict=True):
            assert_same(one, other)
        close(lefts_too, lefts)
        rights, used = between(values, states, nothing, lefts)
        rights_too, used_too = library.between[0](values, states, nothing, lefts)
        close(used_too, used)
        close(rights_too, rights)
        dtypes = (tf.float32, tf.float16, tf.float64)
        sums, finite, left, new = end(values, middles, states, used, rights, scale, dtypes)
        sums_too, finite_too, left_too, new_too = library.end(
            values, middles, states, used, rights, scale, dtypes
        )
        close([m["residual"] for m in left_too], [m["residual"] for m in left])
        close(tf.nest.flatten(new_too), tf.nest.flatten(new))
        for one, other in zip([*sums_too, finite_too], [*sums, finite], strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("unit", [1.0, 1e-30, 1e30])
def test_columns_are_orthonormal_and_redundant_ones_zeros(unit):
    rng = np.random.default_rng(0)
    left = rng.normal(size=(300, 5)).astype("f4")
    left[:, 2] = left[:, 0] - 3 * left[:, 1]
    left[:, 3] = 0
    (basis,) = native.load().tfdml_orthogonal([left * np.float32(unit)])
    (expected,) = orthogonal([tf.constant(left) * unit])
    np.testing.assert_allclose(basis, expected, atol=1e-5)
    gram = basis.numpy().T.astype("f8") @ basis.numpy()
    np.testing.assert_allclose(gram, np.diag([1.0, 1, 0, 0, 1]), atol=1e-6)
    assert not basis.numpy()[:, 2:4].any()


def test_vanished_columns_keep_their_starts():
    rng = np.random.default_rng(1)
    start, right = rng.normal(size=(40, 3)).astype("f4"), rng.normal(size=(3, 40)).astype("f4")
    right[1] = 0
    (following,), finite = native.load().tfdml_next_starts([right], [start], scale=1.0)
    assert bool(finite)
    np.testing.assert_array_equal(following[:, 1], start[:, 1])
    units = right[::2] / np.linalg.norm(right[::2], axis=1, keepdims=True)
    np.testing.assert_allclose(following.numpy()[:, ::2], units.T, rtol=1e-6)


@pytest.mark.parametrize(("number", "scale"), [(np.nan, 1), (-np.inf, 1), (1e30, 1e9), (2e38, 1)])
def test_products_that_overflow_are_not_finite(number, scale):
    right = np.ones((2, 9), "f4")
    for last in (1.0, number):
        right[-1, -1] = last
        _, finite = native.load().tfdml_next_starts([right], [np.ones((9, 2), "f4")], scale=scale)
        assert bool(finite) == (last == 1.0)


def trained_where_one_rank_has_no_operations() -> list[bytes]:
    """Returns the bits of sums and of the next factors after three steps."""
    collective, codec = rank_job.strategy().extended.collective, PowerSGD(3)
    lacking = mock.patch.object(native, "usable", return_value=None)
    with lacking if collective.rank else contextlib.nullcontext():
        aggregator = CompressedAggregator(collective, codec)
        rng = np.random.default_rng(collective.rank)
        for _ in range(3):
            gradients = [tf.constant(rng.normal(size=(96, 64)).astype("f4"))]
            (total,) = aggregator.aggregate(StepGradients(gradients, ["w"], "w"))
    factors = [v.numpy() for name, v in aggregator.state.items() if "residual" not in name]
    return [total.numpy().tobytes(), *(f.tobytes() for f in factors)]


def test_ranks_agree_where_one_has_no_operations(ranks):
    one, other = ranks(2).run(trained_where_one_rank_has_no_operations)
    assert len(one) > 1
    assert one == other


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_values_are_reported(bad):
    gradient = np.ones((64, 64), "f4")
    for value in (1.0, bad):
        gradient[-1, -1] = value
        _, finite, _, _ = summed([tf.constant(gradient)])
        assert bool(finite) == np.isfinite(value)


def summed(gradients, codec=None):
    """Returns the sums of two identical processes."""
    codec = codec or PowerSGD(4)
    return sum_in_rounds(
        LoopbackCollective(2), codec, gradients,
        [{"residual": tf.zeros_like(g)} for g in gradients],
        [codec.init("w", g.shape) for g in gradients], Scales(*ones()), "w",
    )  # fmt: skip


def test_exchange_uses_compiled_operations_if_built(monkeypatch):
    class Own(PowerSGD):
        """A user's subclass, whose steps the operations do not implement."""

    assert operations(PowerSGD()) is native.load()
    assert operations(Own()) is operations(PowerSGD(alternate=True)) is None
    monkeypatch.setattr(native, "usable", lambda: None)
    assert operations(PowerSGD()) is None


def test_static_shapes_are_known_in_a_graph():
    known = []

    @tf.function
    def shapes(gradient):
        values, lefts = native.load().tfdml_left(
            [gradient], [gradient], [tf.zeros([29, 4])], scale=1.0, memory_scale=1.0
        )
        rights = native.load().tfdml_right(values, lefts)
        sums, left_out = native.load().tfdml_product(values, lefts, rights, scale=1.0, size=2)
        known.extend(t.shape.as_list() for t in (*values, *lefts, *rights, *sums, *left_out))
        return sums

    shapes(tf.zeros([3, 3, 16, 29]))
    whole = [3, 3, 16, 29]
    assert known == [whole, [144, 4], [4, 29], whole, whole]


def encoded(gradient: tf.Tensor, residual: tf.Tensor) -> tf.Tensor:
    """Returns the residual of 8-bit rounding."""
    _, left = native.load().tfdml_encode(
        gradients=[gradient], residuals=[residual], scale=1.0, memory_scale=1.0, seed=SEED, rows=1,
        codec="qsgd", block=512, chunk=8192, row_bytes=QSGD().row_bytes(8192),
    )  # fmt: skip
    return left[0]


def left_values(gradient: tf.Tensor, residual: tf.Tensor) -> tf.Tensor:
    """Returns a gradient and its residual."""
    values, _ = native.load().tfdml_left(
        [gradient], [residual], [tf.ones([64, 2])], scale=1.0, memory_scale=1.0
    )
    return values[0]


def product_residual(gradient: tf.Tensor, residual: tf.Tensor) -> tf.Tensor:
    """Returns the residual of a product."""
    _, left_out = native.load().tfdml_product(
        [gradient], [residual[:, :2]], [residual[:2]], scale=1.0, size=2
    )
    return left_out[0]


@pytest.mark.parametrize("operation", [encoded, left_values, product_residual])
def test_buffers_are_forwarded_only_if_unused_elsewhere(operation):
    rng = np.random.default_rng(0)
    start, residual = (tf.constant(rng.normal(size=(128, 64)).astype("f4")) for _ in range(2))
    expected, doubled = operation(2 * start, residual), (2 * start).numpy()

    @tf.function
    def alone():
        return operation(2 * tf.identity(start), residual)

    @tf.function
    def shared():
        gradient = 2 * tf.identity(start)
        result = operation(gradient, residual)
        with tf.control_dependencies([result]):
            return result, gradient + 0.0

    variable = tf.Variable(doubled)
    of_variable = tf.function(lambda: operation(variable.read_value(), residual))
    assert_same(alone(), expected)
    result, gradient = shared()
    assert_same(result, expected)
    np.testing.assert_array_equal(gradient, doubled)
    assert_same(of_variable(), expected)
    np.testing.assert_array_equal(variable, doubled)


def test_out_of_bounds_reads_are_refused():
    library, matrix, start = native.load(), tf.zeros([8, 6]), tf.zeros([6, 2])
    side, fit = "Thin matrices must have the gradients' sides", "`residuals` must be like"
    with pytest.raises(tf.errors.InvalidArgumentError, match=side):
        library.tfdml_left([matrix], [matrix], [tf.zeros([5, 2])], 1.0, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=fit):
        library.tfdml_left([matrix], [matrix[1:]], [start], 1.0, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not empty"):
        library.tfdml_left([matrix[:0]], [matrix[:0]], [start], 1.0, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=side):
        library.tfdml_right([matrix], [tf.zeros([7, 2])])
    right = tf.transpose(start)
    with pytest.raises(tf.errors.InvalidArgumentError, match="transposed"):
        library.tfdml_next_starts([right[:, 1:]], [start], 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not empty"):
        library.tfdml_orthogonal([start[:0]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=side):
        library.tfdml_product([matrix], [tf.zeros([8, 2])], [right[:, 1:]], 1.0, size=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the same rank"):
        library.tfdml_product([matrix], [tf.zeros([8, 3])], [right], 1.0, size=2)
