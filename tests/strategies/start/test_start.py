"""Checks that calls start equally on all ranks."""

import numpy as np
import pytest

from tests.strategies.compare import assert_close, assert_invariant, assert_same_bits
from tests.strategies.start import start_cases as cases


def test_an_unseeded_shuffle_is_read_by_rank_0(ranks):
    by_rank = ranks(3).run(cases.samples_without_seed)
    epochs = [sum(parts, []) for parts in zip(*by_rank, strict=True)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(40))
    assert epochs[0] != epochs[1]


def test_weights_loaded_by_rank_0_reach_all(ranks, tmp_path):
    assert_invariant(ranks.run_sizes((1, 2), cases.loaded_by_rank_0, str(tmp_path)))


@pytest.mark.slow
def test_rank_0_restores_for_all(ranks, tmp_path):
    (one,) = ranks(1).run(cases.uninterrupted)
    results = ranks(2).run(cases.backed_up, str(tmp_path))
    assert_same_bits(results)
    for result in results:
        assert_close(one, result, rtol=1e-5, atol=2e-6, where="")


def test_tensorflow_outlasts_an_outage_of_10_seconds(ranks):
    """Half of its time is an answer's; after 10 s, TCP tries again when 12.6 s have passed."""
    assert min(ranks(2, "multi_worker").run(cases.heartbeat_seconds)) / 2 > 12.6


@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
@pytest.mark.parametrize(("slots", "broadcasts"), [("zeros", 0), ("random", 1)])
def test_slots_are_rank_0s_without_a_broadcast_of_each(ranks, kind, slots, broadcasts):
    first, second = ranks(2, kind).run(cases.built_optimizer, slots)
    assert first["broadcasts"] == second["broadcasts"] == broadcasts
    for value, other in zip(first["values"], second["values"], strict=True):
        assert np.array_equal(value, other)
    if slots == "random":
        assert np.std(first["values"][-1]) > 0.1
