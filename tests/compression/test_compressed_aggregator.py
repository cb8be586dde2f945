"""Checks sums of compressed gradients on simulated ranks: feedback, overflow votes, equal bits."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.compression import numpy_codecs
from tests.compression.aggregate import aggregate
from tfdml.collectives.aggregator import sum_in_buckets
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import (
    QSGD,
    BFloat16,
    DeepGradientCompression,
    Float16,
    NaturalCompression,
    OneBit,
    PowerSGD,
    RandomK,
    TernGrad,
    TopK,
)
from tfdml.compression.compressor import Compressor, Step, SummableCompressor
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.two_phase import chunk_length

SHAPES = [(40, 50), (7,), (3, 3, 16, 24), (2,), (33, 100)]
NAMES = [f"layer_{i}/kernel" for i in range(len(SHAPES))]
# In bytes; equal in all tests of all codecs, because XLA compiles each shape.
BUCKET = 4096
COMPRESSORS = [
    Float16(),
    BFloat16(),
    QSGD(8),
    QSGD(4),
    QSGD(2, bucket_size=64),
    QSGD(8, stochastic=True),
    NaturalCompression(),
    TernGrad(),
    OneBit(),
    TopK(0.1),
    DeepGradientCompression(0.1),
    RandomK(0.1),
    PowerSGD(4),
    PowerSGD(4, alternate=True),
]


class Identity(SummableCompressor):
    """Codec that compresses nothing, so the seam must not change anything."""

    biased = False

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Accepts all gradients."""
        return 4 * math.prod(shape)

    def init(self, name: str, shape: Sequence[int]) -> dict[str, tf.Tensor]:
        """Returns no state."""
        return {}

    @property
    def steps(self) -> Sequence[Step]:
        """Sums the gradients uncompressed."""
        return (
            lambda gradients, states: (list(gradients), []),
            lambda gradients, states, carried, sums: (sums, [{} for _ in gradients], sums),
        )


def gradients(rank: int, step: int, scale: float = 1.0) -> list[tf.Tensor]:
    """Returns one rank's gradients of a step: half of them are common to all ranks and steps."""
    common, own = np.random.default_rng(5), np.random.default_rng([rank, step])
    return [
        tf.constant(((common.normal(size=s) + own.normal(size=s)) * scale).astype("float32"))
        for s in SHAPES
    ]


def run(compressor, size: int, steps: int, **options) -> list:
    """Sums `steps` gradients on simulated ranks; returns each rank's sums and its state."""

    def rank(collective):
        aggregator = CompressedAggregator(collective, compressor, BUCKET)
        sums = [
            [t.numpy() for t in aggregate(aggregator,
                gradients(collective.rank, step), NAMES, "g", **options)]
            for step in range(steps)
        ]  # fmt: skip
        return sums, {name: v.numpy() for name, v in aggregator.state.items()}

    return run_ranks(size, rank)


def true_sums(size: int, steps: int) -> list[list[np.ndarray]]:
    """Returns the exact sums."""
    return [
        [np.sum([g[i] for g in ranks], axis=0) for i in range(len(SHAPES))]
        for ranks in ([gradients(r, step) for r in range(size)] for step in range(steps))
    ]


def _by_default(compressors: Sequence, *others: Compressor) -> list:
    """Returns codecs as parameters: one of each kind by default, its variants as slow tests.

    Args:
        compressors: The codecs.
        *others: Codecs whose tests are slow, too.
    """
    likes = (BFloat16(), QSGD(8), QSGD(4), QSGD(8, stochastic=True), PowerSGD(4, alternate=True))
    likes = {repr(c) for c in (*likes, DeepGradientCompression(0.1), *others)}
    return [pytest.param(c, marks=pytest.mark.slow) if repr(c) in likes else c for c in compressors]


@pytest.mark.slow  # Only with three ranks does an owner differ from the other rank.
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_sums_are_bit_identical_on_two_ranks(compressor):
    _assert_same_bits(compressor, 2)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compressor", _by_default(COMPRESSORS), ids=repr)
def test_sums_are_bit_identical_on_all_ranks(compressor, size):
    _assert_same_bits(compressor, size)


def _assert_same_bits(compressor, size: int) -> None:
    first, *others = (sums for sums, _ in run(compressor, size, 3))
    for other in others:
        for a, b in zip(sum(first, []), sum(other, []), strict=True):
            assert a.tobytes() == b.tobytes()


def missing(compressor, steps: int) -> float:
    """Returns the norm of the values still missing after some steps, summed over them."""
    sums, _ = run(compressor, 2, steps)[0]
    true = zip(*true_sums(2, steps), strict=True)
    pairs = zip(true, zip(*sums, strict=True), strict=True)
    return np.sqrt(sum(((np.sum(t, 0) - np.sum(s, 0)) ** 2).sum() for t, s in pairs))


# Gathered momentum is not a sum of gradients: `test_deep_gradient` has its formula.
FED_BACK = [c for c in COMPRESSORS if c.biased and not c.replaces_momentum]


@pytest.mark.parametrize(
    "compressor", _by_default(FED_BACK, QSGD(2, bucket_size=64), RandomK(0.1)), ids=repr
)
def test_residuals_are_sent_later(compressor):
    class Forgetful(type(compressor)):
        biased = False

    forgetful = Forgetful(**compressor.get_config())
    # Codecs that send a tenth of the values need many steps to send all of them.
    assert missing(compressor, 24) < 0.6 * missing(forgetful, 24)


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if not c.biased], ids=repr)
def test_errors_of_unbiased_codecs_grow_like_a_random_walk(compressor):
    assert missing(compressor, 16) < 3 * np.sqrt(16) * missing(compressor, 1)


def test_error_feedback_matches_its_formula():
    """QSGD with the arithmetic of one rank, three steps, in NumPy."""
    size, steps, codec = 2, 3, QSGD(4, bucket_size=64)
    shape, block = (40, 50), 64
    chunk = chunk_length(40 * 50, size, block)
    own = [np.zeros(size * chunk, "float32") for _ in range(size)]
    server = [np.zeros(chunk, "float32") for _ in range(size)]

    def grad(rank, step):
        return gradients(rank, step)[0].numpy()

    expected = []
    for step in range(steps):
        sent = []
        for rank in range(size):
            flat = np.zeros(size * chunk, "float32")
            flat[:2000] = grad(rank, step).reshape(-1) + own[rank][:2000]
            _, decoded = numpy_codecs.qsgd(flat.reshape(size, chunk), 4, block)
            own[rank][:2000] = (flat - decoded.reshape(-1))[:2000]
            sent.append(decoded)
        total = []
        for owner in range(size):
            summed = np.sum([s[owner] for s in sent], 0, dtype="float32") + server[owner]
            _, decoded = numpy_codecs.qsgd(summed[None], 4, block)
            server[owner] = summed - decoded[0]
            total.append(decoded[0])
        expected.append(np.concatenate(total)[:2000].reshape(shape))

    def rank(collective):
        aggregator = CompressedAggregator(collective, codec)
        return [
            aggregate(aggregator,
                [tf.constant(grad(collective.rank, s))], NAMES[:1], "g"
            )[0].numpy()
            for s in range(steps)
        ]  # fmt: skip

    for result in run_ranks(size, rank):
        # A sum that rounds differently may rarely fall on the other side of a code's border.
        for a, b in zip(result, expected, strict=True):
            assert np.mean(np.abs(a - b) > 1e-4) < 0.005


def test_power_sgd_matches_its_formula():
    matrices = [gradients(rank, 0)[0].numpy().astype("float64") for rank in range(3)]
    start = PowerSGD(4).init(NAMES[0], (40, 50))["q"].numpy()
    expected, right = numpy_codecs.power_sgd(matrices, start)
    for sums, state in run(PowerSGD(4), 3, 1):
        np.testing.assert_allclose(sums[0][0], expected, rtol=2e-3, atol=2e-3)
        residual = state[f"residual/{NAMES[0]}"]
        assert residual.shape == (40, 50)
        np.testing.assert_allclose(
            np.linalg.norm(state[f"q/{NAMES[0]}"], axis=0), np.ones(4), rtol=1e-5
        )
        # The same directions, except for their lengths.
        unit = right / np.linalg.norm(right, axis=0)
        angles = np.abs(np.sum(unit * state[f"q/{NAMES[0]}"], 0))
        assert angles[0] == pytest.approx(1.0, abs=1e-3)


def test_power_sgd_in_turns_matches_its_formula():
    matrices = [gradients(rank, 0)[0].numpy().astype("float64") for rank in range(2)]
    start = PowerSGD(4, alternate=True).init(NAMES[0], (40, 50))["q"].numpy()
    base = np.linalg.qr(start)[0]
    left = sum(m @ base for m in matrices)
    first = left @ base.T
    base = np.linalg.qr(left)[0]
    # The residual of the first step enters the second one.
    rest = [2 * m - first / 2 for m in matrices]
    second = base @ (base.T @ sum(rest))

    def rank(collective):
        aggregator = CompressedAggregator(collective, PowerSGD(4, alternate=True))
        own = [gradients(collective.rank, 0)[0]]
        return [aggregate(aggregator, own, NAMES[:1], "g")[0].numpy() for _ in range(2)]

    for one, two in run_ranks(2, rank):
        np.testing.assert_allclose(one, first, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(two, second, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("value", ["zero", "rank 1", "tiny"])
def test_power_sgd_handles_degenerate_gradients(value):
    outer = np.outer(np.arange(1, 41), np.ones(50)).astype("float32")
    first = {"zero": 0 * outer, "rank 1": outer, "tiny": outer * np.float32(1e-25)}[value]

    def rank(collective):
        aggregator = CompressedAggregator(collective, PowerSGD(4))
        sums = [
            aggregate(aggregator, [tf.constant(g)], NAMES[:1], "g")[0].numpy()
            for g in (first, outer)
        ]
        return sums

    for one, two in run_ranks(2, rank):
        np.testing.assert_allclose(one, 2 * first, rtol=1e-4)
        np.testing.assert_allclose(two, 2 * outer, rtol=1e-4)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("index", [0, 1])  # Compressed; too small to be compressed.
def test_overflow_reaches_all_ranks_and_keeps_the_state(compressor, index):
    def rank(collective):
        aggregator = CompressedAggregator(collective, compressor, BUCKET)
        aggregate(aggregator, gradients(collective.rank, 0), NAMES, "g")
        before = {name: v.numpy() for name, v in aggregator.state.items()}
        bad = gradients(collective.rank, 1)
        if collective.rank == 1:
            array = bad[index].numpy()
            array.flat[3] = np.inf
            bad[index] = tf.constant(array)
        sums = aggregate(aggregator, bad, NAMES, "g")
        after = {name: v.numpy() for name, v in aggregator.state.items()}
        return np.isfinite(sums[index]).all(), before, after

    for finite, before, after in run_ranks(2, rank):
        assert not finite
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value.tobytes() == after[name].tobytes(), name


def test_residuals_do_not_depend_on_the_loss_scale():
    """The same gradients with a different scale in each step leave the same residual."""
    codec = next(c for c in COMPRESSORS if repr(c) == repr(QSGD(4)))

    def rank(collective, scales):
        aggregator = CompressedAggregator(collective, codec, BUCKET)
        for step, scale in enumerate(scales):
            sums = aggregate(
                aggregator, gradients(collective.rank, step, scale), NAMES, "g", tf.constant(scale)
            )
        return [t.numpy() / scales[-1] for t in sums], aggregator.state["residual/" + NAMES[0]]

    plain = run_ranks(2, lambda c: rank(c, [1.0, 1.0, 1.0]))
    scaled = run_ranks(2, lambda c: rank(c, [1024.0, 512.0, 2.0]))
    for (sums, residual), (other_sums, other_residual) in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(residual, other_residual)
        for a, b in zip(sums, other_sums, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_residuals_follow_the_learning_rate():
    """A residual of a step with rate 0.1 counts ten times as much in a step with rate 0.01."""

    def rank(collective):
        aggregator = CompressedAggregator(collective, QSGD(2))
        aggregate(aggregator, gradients(0, 0), NAMES, "g", None, tf.constant(0.1))
        residual = aggregator.state["residual/" + NAMES[0]].numpy()
        zeros = [tf.zeros(s) for s in SHAPES]
        sums = aggregate(aggregator, zeros, NAMES, "g", None, tf.constant(0.01))
        return residual, sums[0].numpy(), aggregator.state["residual/" + NAMES[0]].numpy()

    for residual, _, after in run_ranks(2, rank):
        # The sent part of the residual and the remaining one add up to ten times the residual.
        _, decoded = numpy_codecs.qsgd(np.zeros((1, 64), "float32"), 2, 64)
        assert np.abs(after).max() <= 10 * np.abs(residual).max() * 1.01
        assert np.abs(after).max() > 2 * np.abs(residual).max()


@pytest.mark.parametrize("size", [2, 3])
def test_identity_codec_changes_nothing(size):
    def plain(collective):
        return [t.numpy() for t in sum_in_buckets(collective, gradients(collective.rank, 0), "g")]

    expected = run_ranks(size, plain)
    for (sums, _), wanted in zip(run(Identity(), size, 1), expected, strict=True):
        for a, b in zip(sums[0], wanted, strict=True):
            assert a.tobytes() == b.tobytes()


def test_parts_of_a_bucket_equal_separate_exchanges():
    """Codec with blocks of a gradient's shape, in one bucket each or all in one."""

    def rank(collective, limit):
        aggregator = CompressedAggregator(collective, OneBit(), limit)
        for step in range(3):
            sums = aggregate(aggregator, gradients(collective.rank, step), NAMES, "g")
        return [t.numpy().tobytes() for t in sums]

    alone, together = (run_ranks(2, lambda c, n=n: rank(c, n)) for n in (BUCKET, 1 << 20))
    assert alone == together


def goes_on(compressor, bucket_bytes: int) -> list[list[np.ndarray]]:
    """Returns each rank's second sums, with another bucket size than for the first ones."""

    def first_step(collective):
        aggregator = CompressedAggregator(collective, compressor, BUCKET)
        aggregate(aggregator, gradients(collective.rank, 0), NAMES, "g")
        return {name: v.numpy() for name, v in aggregator.state.items()}

    before = run_ranks(2, first_step)

    def after(collective):
        aggregator = CompressedAggregator(collective, compressor, bucket_bytes)
        aggregator.restore(before)
        sums = aggregate(aggregator, gradients(collective.rank, 1), NAMES, "g")
        return [s.numpy() for s in sums]

    return run_ranks(2, after)


def test_owner_state_survives_other_buckets_of_the_same_parts():
    """For `OneBit`, each matrix is a separate part."""
    same, other = goes_on(OneBit(), BUCKET), goes_on(OneBit(), 1 << 20)
    for rank in range(2):
        for expected, actual in zip(same[rank], other[rank], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_owner_state_of_other_parts_is_refused():
    goes_on(QSGD(4), BUCKET)
    with pytest.raises(
        ValueError,
        match=r"bucket_bytes`. Received: part/g/layer_4/kernel of \[3300, 512\], but the model",
    ):
        goes_on(QSGD(4), 1 << 20)


def test_small_and_one_dimensional_tensors_are_not_compressed():
    sums, state = run(QSGD(2), 2, 1)[0]
    for i, total in enumerate(true_sums(2, 1)[0]):
        exact = np.allclose(sums[0][i], total, rtol=1e-6)
        assert exact == (len(SHAPES[i]) == 1)
        assert (f"residual/{NAMES[i]}" in state) == (len(SHAPES[i]) > 1)


def test_sparse_gradients_stay_sparse():
    def rank(collective):
        aggregator = CompressedAggregator(collective, QSGD(8))
        slices = tf.IndexedSlices(tf.ones([2, 600]), tf.constant([0, collective.rank]), [9, 600])
        (total,) = aggregate(aggregator, [slices], ["e"], "g")
        return total

    for total in run_ranks(2, rank):
        assert isinstance(total, tf.IndexedSlices)
        assert total.indices.numpy().tolist() == [0, 1]  # Each row once.
