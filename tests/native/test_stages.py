"""Checks that the compiled operations are bit-identical to TensorFlow's, for all options."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.compression import numpy_codecs
from tfdml import native
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.compression import QSGD, BFloat16, Float16, NaturalCompression, OneBit, TernGrad, TopK
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.native_stages import NativeStages, chunk_length, operations
from tfdml.compression.exchange.two_phase import compiled_stages, sum_in_two_phases

CODECS = [
    Float16(),
    BFloat16(),
    NaturalCompression(),
    TernGrad(),
    QSGD(8),
    QSGD(4),
    QSGD(2, 64),
    QSGD(8, 24, "l2"),
    QSGD(8, stochastic=True),
    QSGD(4, 128, "l2", stochastic=True),
    OneBit(),
    OneBit().parts([(300, 100)])[0][0],
]
# Together not a multiple of a block; one tensor is shorter than a block, one is empty.
SHAPES = ((37, 50), (64, 64), (3, 1, 7), (0, 4), (5,))
SEED = tf.constant([3, 5])


def both(codec, size: int):
    """Returns the stages of both implementations."""
    assert native.load() is not None, "Build them: tfdml build-codecs."
    return compiled_stages(codec, size), NativeStages(native.load(), codec, size, 8)


def numbers(rng, shape) -> tf.Tensor:
    """Returns normal values whose sizes differ by some orders of magnitude."""
    return tf.constant((rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype("f4"))


def assert_same(one: tf.Tensor, other: tf.Tensor) -> None:
    """Compares shapes and bits."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert one.numpy().tobytes() == other.numpy().tobytes()


# One rank sends nothing; without a sum, XLA of TensorFlow 2.20 would round differently.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_all_stages_are_bit_identical(codec, size):
    (encode, add, decode), compiled = both(codec, size)
    rng = np.random.default_rng(size)
    for scale, memory_scale in ((1.0, 1.0), (1.0, 0.7), (1024.0, 0.7), (3.0, 1.0)):
        scale, memory_scale = tf.constant(scale), tf.constant(memory_scale)
        gradients = [numbers(rng, shape) for shape in SHAPES]
        states = [{"residual": numbers(rng, s)} if codec.biased else {} for s in SHAPES]
        payload, left = encode(gradients, states, scale, memory_scale, SEED)
        payload_too, left_too = compiled.encode(gradients, states, scale, memory_scale, SEED)
        assert_same(payload, payload_too)
        assert [set(state) for state in left] == [set(state) for state in left_too]
        for one, other in zip(left, left_too, strict=True):
            for key in one:
                assert_same(one[key], other[key])
        chunk = chunk_length(sum(map(math.prod, SHAPES)), size, codec.block)
        server = {"residual": numbers(rng, chunk)} if codec.biased else {}
        received = payload
        encoded, remainder = add(received, server, memory_scale, chunk, SEED)
        encoded_too, remainder_too = compiled.add(received, server, memory_scale, chunk, SEED)
        assert_same(encoded, encoded_too)
        for key in server:
            assert_same(remainder[key], remainder_too[key])
        gathered = tf.tile(encoded, [size, 1])
        dtypes = (tf.float32, tf.float16, tf.float32, tf.float32, tf.float64)
        sums, finite = decode(gathered, SHAPES, dtypes, scale)
        sums_too, finite_too = compiled.decode(gathered, SHAPES, dtypes, scale)
        assert bool(finite) == bool(finite_too)
        for one, other in zip(sums, sums_too, strict=True):
            assert_same(one, other)


def test_bytes_match_the_formula():
    rows = np.random.default_rng(0).normal(size=(2, 256)).astype("f4")
    for bits in (8, 4, 2):
        _, compiled = both(QSGD(bits, 64), 2)
        payload, _ = compiled.encode(
            [tf.constant(rows)], [{"residual": tf.zeros([2, 256])}], *ones(), SEED
        )
        assert payload.numpy().tobytes() == numpy_codecs.qsgd(rows, bits, 64)[0]


def ones():
    """Returns a scale, and the factor of residuals."""
    return tf.constant(1.0), tf.constant(1.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nonfinite_values_are_reported(codec, bad):
    _, compiled = both(codec, 2)
    gradient = np.ones((64, 64), "f4")
    for value in (1.0, bad):
        gradient[-1, -1] = value
        states = [{"residual": tf.zeros([64, 64])} if codec.biased else {}]
        payload, _ = compiled.encode([tf.constant(gradient)], states, *ones(), SEED)
        chunk = chunk_length(64 * 64, 2, codec.block)
        server = {"residual": tf.zeros([chunk])} if codec.biased else {}
        encoded, _ = compiled.add(payload, server, tf.constant(1.0), chunk, SEED)
        gathered = tf.concat([payload[:1], encoded], 0)
        _, finite = compiled.decode(gathered, [(64, 64)], [tf.float32], tf.constant(1.0))
        assert bool(finite) == np.isfinite(value)


def test_static_shapes_are_known_in_a_graph():
    _, compiled = both(QSGD(), 2)

    @tf.function
    def shapes(gradient):
        state = [{"residual": gradient}]
        payload, left = compiled.encode([gradient], state, *ones(), SEED)
        sums, finite = compiled.decode(payload, [(30, 40)], [tf.float32], tf.constant(1.0))
        known.extend([payload.shape, left[0]["residual"].shape, sums[0].shape, finite.shape])
        return payload

    known = []
    shapes(tf.zeros([30, 40]))
    assert [s.as_list() for s in known] == [[2, 2 * 512 + 8], [30, 40], [30, 40], []]


def test_exchange_uses_compiled_operations_if_built(monkeypatch):
    class Own(QSGD):
        """A user's subclass, whose `encode` the operations do not implement."""

    assert operations(QSGD(), 2) is native.load()
    for codec in (Own(), TopK()):
        assert operations(codec, 2) is None
    gradient = tf.random.stateless_normal([64, 64], [0, 1])
    results = []
    for library in (native.load(), None):
        monkeypatch.setattr(native, "usable", lambda library=library: library)
        result = sum_in_two_phases(
            LoopbackCollective(2), QSGD(), [gradient], [{"residual": gradient}],
            [{"residual": tf.zeros([2048])}], Scales(*ones()), tf.constant(0), "w",
        )  # fmt: skip
        results.append(tf.nest.flatten(result))
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


RIGHT = {
    "codec": "qsgd",
    "block": 8,
    "chunk": 16,
    "row_bytes": 24,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codec": "zip"}, "`codec` must be the name of one"),
        ({"bits": 3}, "`bits` must be 8, 4 or 2"),
        ({"block": 12}, "`block` must be a multiple of 8"),
        ({"chunk": 12}, "`block` must be a multiple of 8, `chunk` of `block`"),
        ({"codec": "onebit"}, "`block` must be 8 rows of `columns`"),
        ({"row_bytes": 23}, "`row_bytes` must be those of a chunk"),
        ({"row_bytes": 32}, "Rows must have `row_bytes` bytes"),
        ({"shapes": [[33]]}, "Rows must hold all numbers"),
    ],
)
def test_out_of_bounds_reads_are_refused(changed, message):
    arguments = {**RIGHT, "shapes": [[32]], "gathered": tf.zeros([2, 24], tf.uint8)}
    native.load().tfdml_decode(scale=1.0, n=1, **arguments)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        native.load().tfdml_decode(scale=1.0, n=1, **{**arguments, **changed})


def test_residuals_must_have_matching_shapes():
    library, rows = native.load(), tf.zeros([2, 24], tf.uint8)
    for residuals in ([tf.zeros([31])], [tf.zeros([32])] * 2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="`residuals` must be like"):
            library.tfdml_encode([tf.zeros([32])], residuals, 1.0, 1.0, SEED, rows=2, **RIGHT)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the numbers of a chunk"):
        library.tfdml_add(rows, [tf.zeros([15])], 1.0, SEED, **RIGHT)
