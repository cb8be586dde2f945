"""Checks sums of compressed gradients at their owners, on simulated ranks."""

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.compression import numpy_codecs
from tfdml.collectives.aggregator import StepFactors, StepGradients
from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import Cut, cut_in_rows, own_whole
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import (
    QSGD,
    Auto,
    BFloat16,
    Compressor,
    DeepGradientCompression,
    Float16,
    NaturalCompression,
    OneBit,
    PowerSGD,
    RandomK,
    TernGrad,
    TopK,
)
from tfdml.compression.auto import auto_aggregator
from tfdml.compression.auto.auto_aggregator import make_aggregator
from tfdml.compression.auto.cost_model import traffic
from tfdml.compression.exchange.compressed_parts import CompressedPartAggregator
from tfdml.compression.exchange.to_owners import can_send_to_owners

# Cut by rows, too small to be cut, too small to be compressed, cut between any numbers.
SHAPES = [(96, 50), (7,), (64, 3), (3, 1024)]
NAMES = [f"layer_{i}/kernel" for i in range(len(SHAPES))]
COMPRESSORS = [
    Float16(),
    BFloat16(),
    QSGD(8),
    QSGD(4, bucket_size=64),
    QSGD(8, stochastic=True),
    NaturalCompression(),
    TernGrad(),
    OneBit(),
    TopK(0.1),
]
FED_BACK = [c for c in COMPRESSORS if c.biased]


def by_rows(ranks: int) -> list[Cut | None]:
    """Returns the gradients' cuts, as for Adam."""
    return [cut_in_rows(shape, ranks) for shape in SHAPES]


def whole(ranks: int) -> list[Cut | None]:
    """Returns the gradients' cuts, as for LAMB: on 3 ranks, one owns nothing that is compressed."""
    return own_whole(SHAPES, ranks)


def gradients(rank: int, step: int, scale: float = 1.0) -> list[np.ndarray]:
    """Returns one rank's gradients of a step."""
    rng = np.random.default_rng([rank, step])
    return [(rng.normal(size=shape) * scale).astype("float32") for shape in SHAPES]


def aggregate(
    aggregator: CompressedPartAggregator,
    values: Sequence[np.ndarray],
    cuts: Sequence[Cut | None],
    loss_scale: float | None = None,
    learning_rate: float | None = None,
) -> list[np.ndarray]:
    """Returns the sums of a rank's parts."""
    factors = StepFactors(
        None if loss_scale is None else tf.constant(loss_scale),
        None if learning_rate is None else tf.constant(learning_rate),
    )
    step = StepGradients(
        [tf.constant(v) for v in values],
        NAMES,
        "g",
        lambda: factors,
        cuts=cuts,
        may_overflow=loss_scale is not None,
    )
    return [total.numpy() for total in aggregator.aggregate(step)]


def joined(sums: Sequence[Sequence[np.ndarray]], cuts: Sequence[Cut | None]) -> list[np.ndarray]:
    """Returns whole gradients from each rank's parts."""
    return [
        of_ranks[0]
        if cut is None
        else np.concatenate([part.ravel() for part in of_ranks]).reshape(cut.shape)
        for of_ranks, cut in zip(zip(*sums, strict=True), cuts, strict=True)
    ]


def run(
    compressor: Compressor, cuts: Sequence[Cut | None], ranks: int, steps: int
) -> tuple[list[list[np.ndarray]], list[dict[str, np.ndarray]]]:
    """Returns the whole sums of each step, and each rank's state at the end."""

    def rank(collective: Collective):
        aggregator = CompressedPartAggregator(collective, compressor, 4096)
        sums = [
            aggregate(aggregator, gradients(collective.rank, step), cuts) for step in range(steps)
        ]
        return sums, {name: v.numpy() for name, v in aggregator.state.items()}

    results = run_ranks(ranks, rank)
    by_step = zip(*(sums for sums, _ in results), strict=True)
    return [joined(sums, cuts) for sums in by_step], [state for _, state in results]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("divide", [by_rows, whole])
@pytest.mark.parametrize("compressor", FED_BACK, ids=repr)
def test_what_a_sum_lacks_is_in_the_residuals(compressor, divide, ranks):
    """All gradients of three steps are in the sums or in a rank's residual; nothing is lost."""
    cuts = divide(ranks)
    sums, states = run(compressor, cuts, ranks, 3)
    for i, name in enumerate(NAMES):
        true = np.sum([gradients(r, s)[i] for r in range(ranks) for s in range(3)], axis=0)
        found = np.sum([step[i] for step in sums], axis=0)
        residuals = [state.get(f"residual/{name}", np.zeros(1)) for state in states]
        np.testing.assert_allclose(found + np.sum(residuals, axis=0), true, rtol=1e-4, atol=1e-4)
    # The residual belongs to what was compressed, and is the error that remains there.
    assert set(states[0]) == {f"residual/{n}" for n in (NAMES[0], NAMES[3])} | {"step"}
    assert all(np.any(state[f"residual/{NAMES[0]}"]) for state in states)


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if not c.biased], ids=repr)
def test_unbiased_sums_keep_nothing_and_are_right_on_average(compressor):
    cuts = by_rows(2)
    sums, states = run(compressor, cuts, 2, 16)
    assert set(states[0]) == {"step"}

    def missing(steps: int) -> float:
        true = np.sum([gradients(r, s)[0] for r in range(2) for s in range(steps)], axis=0)
        return float(np.linalg.norm(np.sum([step[0] for step in sums[:steps]], axis=0) - true))

    assert 0 < missing(16) < 3 * np.sqrt(16) * missing(1)


def test_sums_match_their_formula():
    """QSGD with the arithmetic of two ranks, three steps, in NumPy: sums are encoded once."""
    block, cut = 64, cut_in_rows(SHAPES[0], 2)
    own = [np.zeros(SHAPES[0], "float32") for _ in range(2)]
    expected = []
    for step in range(3):
        total = np.zeros(SHAPES[0], "float32")
        for rank in range(2):
            value = gradients(rank, step)[0] + own[rank]
            sent = []
            for owner in range(2):
                part = cut.part_of(value, owner).ravel()
                padded = np.pad(part, (0, -part.size % block))
                _, decoded = numpy_codecs.qsgd(padded[None], 4, block)
                sent.append(decoded[0, : part.size])
            decoded = np.concatenate(sent).reshape(SHAPES[0])
            own[rank] = value - decoded
            total += decoded
        expected.append(total)
    sums, _ = run(QSGD(4, bucket_size=64), [cut, *by_rows(2)[1:]], 2, 3)
    for step, wanted in zip(sums, expected, strict=True):
        # A value that rounds differently may rarely fall on the other side of a code's border.
        assert np.mean(np.abs(step[0] - wanted) > 1e-4) < 0.005


def test_what_is_not_compressed_is_summed_as_it_is():
    sums, _ = run(QSGD(4), by_rows(2), 2, 1)
    for i in (1, 2):
        np.testing.assert_array_equal(sums[0][i], gradients(0, 0)[i] + gradients(1, 0)[i])


@pytest.mark.parametrize("compressor", [Float16(), QSGD(8), OneBit(), TopK(0.1)], ids=repr)
@pytest.mark.parametrize("index", [0, 1])  # Compressed; too small for it.
def test_an_overflow_at_one_owner_skips_the_step_everywhere(compressor, index):
    cuts = by_rows(2)

    def rank(collective: Collective):
        aggregator = CompressedPartAggregator(collective, compressor, 4096)
        aggregate(aggregator, gradients(collective.rank, 0), cuts, loss_scale=2.0)
        before = {name: v.numpy() for name, v in aggregator.state.items()}
        bad = gradients(collective.rank, 1)
        if collective.rank == 1:
            # In the part of rank 0.
            bad[index].flat[3] = np.inf
        sums = aggregate(aggregator, bad, cuts, loss_scale=2.0)
        after = {name: v.numpy() for name, v in aggregator.state.items()}
        return sums, before, after

    for sums, before, after in run_ranks(2, rank):
        assert all(np.isnan(total).all() for total in sums)
        for name, value in before.items():
            assert value.tobytes() == after[name].tobytes(), name


def test_residuals_do_not_depend_on_the_loss_scale_and_follow_the_learning_rate():
    cuts = by_rows(2)

    def rank(collective: Collective, scales: Sequence[float]):
        aggregator = CompressedPartAggregator(collective, QSGD(4), 4096)
        for step, scale in enumerate(scales):
            values = gradients(collective.rank, step, scale)
            sums = aggregate(aggregator, values, cuts, scale, 0.1)
        residual = aggregator.state["residual/" + NAMES[0]].numpy()
        zeros = [np.zeros(shape, "float32") for shape in SHAPES]
        last = aggregate(aggregator, zeros, cuts, 1.0, 0.01)
        after = aggregator.state["residual/" + NAMES[0]].numpy()
        return sums[0] / scales[-1], residual, last[0], after

    plain = run_ranks(2, lambda c: rank(c, [1.0, 1.0]))
    scaled = run_ranks(2, lambda c: rank(c, [1024.0, 2.0]))
    for (sums, residual, _, _), (other_sums, other, _, _) in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(residual, other)
        np.testing.assert_allclose(sums, other_sums, rtol=1e-6)
    # At a tenth of the rate, ten times the residual is sent or kept.
    last = np.concatenate([result[2].ravel() for result in plain]).reshape(SHAPES[0])
    total, kept = sum(r[1] for r in plain), sum(r[3] for r in plain)
    np.testing.assert_allclose(last + kept, 10 * total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_residuals_go_on_with_another_number_of_ranks(ranks):
    """The sum of the ranks' residuals, which is what training lacks, stays the same."""
    _, states = run(QSGD(4), by_rows(2), 2, 2)

    def rank(collective: Collective):
        aggregator = CompressedPartAggregator(collective, QSGD(4), 4096)
        aggregator.restore(states)
        zeros = [np.zeros(shape, "float32") for shape in SHAPES]
        sums = aggregate(aggregator, zeros, by_rows(ranks))
        return sums, aggregator.state["residual/" + NAMES[0]].numpy()

    results = run_ranks(ranks, rank)
    sent = joined([sums for sums, _ in results], by_rows(ranks))[0]
    before = sum(state["residual/" + NAMES[0]] for state in states)
    np.testing.assert_allclose(sent + sum(r for _, r in results), before, rtol=1e-4, atol=1e-4)


def test_state_has_the_bytes_that_are_predicted():
    cuts = by_rows(2)

    def rank(collective: Collective):
        aggregator = CompressedPartAggregator(collective, QSGD(4), 4096)
        values = [tf.constant(v) for v in gradients(collective.rank, 0)]
        step = StepGradients(values, NAMES, "g", cuts=cuts)
        predicted = aggregator.state_bytes(step)
        aggregator.aggregate(step)
        return predicted, {name: v.numpy().nbytes for name, v in aggregator.state.items()}

    for predicted, found in run_ranks(2, rank):
        assert predicted == found


def test_which_compressors_can_send_to_owners():
    assert all(map(can_send_to_owners, COMPRESSORS))
    others = [PowerSGD(4), RandomK(0.1), DeepGradientCompression(0.1)]
    assert not any(map(can_send_to_owners, others))


def test_auto_leaves_out_what_cannot_send_to_owners(capsys):
    """It keeps the candidates' residuals, and its sums are those of its choice."""
    cuts = by_rows(2)

    def rank(collective: Collective):
        auto = Auto([PowerSGD(4), BFloat16()])
        aggregator = make_aggregator(collective, auto, 4096, to_owners=True)
        sums = aggregate(aggregator, gradients(collective.rank, 0), cuts)
        return sums, aggregator.choices["g"].names

    results = run_ranks(2, rank)
    assert results[0][1] == ["no compression", "BFloat16()"]
    true = [a + b for a, b in zip(gradients(0, 0), gradients(1, 0), strict=True)]
    for total, wanted in zip(joined([s for s, _ in results], cuts), true, strict=True):
        np.testing.assert_allclose(total, wanted, rtol=0.02, atol=0.02)
    assert "Starts with" in capsys.readouterr().out
    auto_aggregator._measured.clear()


@pytest.mark.parametrize("compressor", [None, QSGD(8), OneBit()], ids=repr)
def test_traffic_is_that_of_the_exchanges(compressor):
    """Bytes to the owners, as sent, and the weights' bytes on the way back."""
    ranks, cuts = 3, by_rows(3)
    sent = [0] * ranks

    def rank(collective: Collective):
        inner = collective.all_to_all_rows

        def counted(tensor, counts, name):
            others = sum(counts) - counts[collective.rank]
            sent[collective.rank] += others * tensor.dtype.size
            return inner(tensor, counts, name)

        collective.all_to_all_rows = counted
        aggregator = make_aggregator(collective, compressor, to_owners=True)
        return aggregate(aggregator, gradients(collective.rank, 0), cuts)

    run_ranks(ranks, rank)
    dtypes = [tf.float32] * len(SHAPES)
    predicted = traffic(compressor, SHAPES, dtypes, ranks, to_owners=True).sent
    weights = 4 * sum(map(np.prod, SHAPES))
    back = (ranks - 1) / ranks * weights
    assert np.mean(sent) == pytest.approx(predicted - back, rel=0.02)
    if compressor is not None:
        plain = traffic(None, SHAPES, dtypes, ranks, to_owners=True).sent
        assert 0.5 < predicted / plain < 0.7
