"""Checks that the path from a train step to the exchange and the update enters each file once."""

from tests.strategies.seam import stack_cases as cases


def test_call_stack_from_train_step(ranks):
    for found in ranks(2).run(cases.ways):
        assert found["exchange"]
        assert found["update"]
        for way in [*found["exchange"], *found["update"]]:
            assert len(way) <= 9, way
            assert len(set(way)) == len(way), way
        # The path is complete: it begins at the one entry, and ends at the exchange or the update.
        assert {way[0] for way in found["exchange"]} == {"strategies/keras_seam/entry.py"}
        assert {way[-1] for way in found["exchange"]} == {"collectives/observed_collective.py"}
