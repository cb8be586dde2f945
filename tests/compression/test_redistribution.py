"""Checks that the ranks' state is redistributed over another number of ranks without loss."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.aggregate import aggregate
from tests.compression.test_compressed_aggregator import NAMES, SHAPES, gradients
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import DeepGradientCompression, OneBit, PowerSGD, TopK, redistributed
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator

STEPS = 12


def steps(collective, compressor, steps: int, state=None, zero: bool = False) -> tuple:
    """Returns the total of some steps' sums, and the state afterwards."""
    aggregator = CompressedAggregator(collective, compressor)
    if state is not None:
        aggregator.restore(state)
    total = [np.zeros(s, "float32") for s in SHAPES]
    for step in range(steps):
        own = gradients(collective.rank, step)
        own = [tf.zeros_like(g) for g in own] if zero else own
        sums = aggregate(aggregator, own, NAMES, "g")
        total = [a + b.numpy() for a, b in zip(total, sums, strict=True)]
    return total, {name: v.numpy() for name, v in aggregator.state.items()}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "compressor",
    [TopK(0.1), OneBit(), pytest.param(PowerSGD(4), marks=pytest.mark.slow)],
    ids=repr,
)
def test_pending_values_are_sent_by_other_ranks(compressor, size):
    """Three ranks' gradients, then none: the remaining ranks deliver the residuals."""
    before = run_ranks(3, lambda c: steps(c, compressor, 2))
    new_states = redistributed([state for _, state in before], size)
    assert len(new_states) == size
    waiting = _waiting([state for _, state in before])
    assert _waiting(new_states) == pytest.approx(waiting, rel=1e-5)
    if size == 1:
        return  # One process sends nothing.
    after = run_ranks(size, lambda c: steps(c, compressor, 60, new_states, zero=True))
    true = sum(gradients(r, s)[0].numpy() for r in range(3) for s in range(2))
    received = before[0][0][0] + after[0][0][0]
    missing = np.linalg.norm(true - received), np.linalg.norm(true - before[0][0][0])
    assert missing[0] < 0.3 * missing[1]


def _waiting(states: list[dict]) -> list[float]:
    """Returns the total of all values that wait to be sent, for each kind of state."""
    sums: dict[str, float] = {}
    for name in states[0]:
        kind, _, rest = name.partition("/")
        whole = np.concatenate([state[name].reshape(-1) for state in states if name in state])
        if kind == "server_residual":
            # The padding of a part's chunks follows its values.
            whole = whole[: states[0][f"part/{rest}"][0]]
        if kind in ("residual", "server_residual"):
            sums[name] = float(whole.sum(dtype="float64"))
    return [sums[name] for name in sorted(sums)]


def test_momentum_of_summed_gradients_is_copied_and_of_gathered_ones_shared():
    compressor = DeepGradientCompression(0.1)
    before = [state for _, state in run_ranks(2, lambda c: steps(c, compressor, 3))]
    new_states = redistributed(before, 4)
    for name in (NAMES[1], NAMES[3]):
        np.testing.assert_array_equal(
            new_states[3][f"sum_velocity/{name}"], before[0][f"sum_velocity/{name}"]
        )
    total = sum(state[f"velocity/{NAMES[0]}"] for state in new_states)
    np.testing.assert_allclose(
        total, sum(state[f"velocity/{NAMES[0]}"] for state in before), rtol=1e-5, atol=1e-6
    )
    assert int(new_states[3]["step"]) == 3


def test_resuming_with_the_same_ranks_changes_nothing():
    compressor = TopK(0.1)
    whole = run_ranks(2, lambda c: steps(c, compressor, 2))
    states = [state for _, state in whole]
    again = redistributed(states, 2)
    for old, new in zip(states, again, strict=True):
        shared = {n for n in old if n.startswith("residual/")}
        for name in old.keys() - shared:
            if not name.startswith("server_residual/"):
                np.testing.assert_array_equal(old[name], new[name])


def test_states_of_another_job_are_refused():
    with pytest.raises(ValueError, match="`states` must be those of all ranks of one job"):
        redistributed([{"step": np.zeros(())}, {}], 2)
    with pytest.raises(ValueError, match="`size` must be a positive number"):
        redistributed([{"step": np.zeros(())}], 0)

    def rank(collective):
        aggregator = CompressedAggregator(collective, TopK(0.1))
        aggregate(aggregator, gradients(collective.rank, 0), NAMES, "g")
        aggregator.restore([{f"residual/{NAMES[0]}": np.zeros(3, "float32")}] * 2)

    with pytest.raises(ValueError, match="`before` must be of the same model"):
        run_ranks(2, rank)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_momentum_stays_with_its_rank(size):
    before = [{"momentum/kernel": np.full(3, rank), "center/kernel": np.ones(3)} for rank in (0, 1)]
    after = redistributed(before, size)
    assert [state["momentum/kernel"][0] for state in after] == [0, 1, 0, 1, 0][:size]
    assert all(state["center/kernel"][0] == 1 for state in after)
