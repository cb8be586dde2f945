"""Checks the difference of ranks' clocks: seconds apart, busy ranks, slow and lost answers."""

import time

import pytest

from tests.callbacks import timeline_cases as cases
from tfdml.runtime.guard.remote_clock import RemoteClock, answer


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_clock_that_is_seconds_ahead_is_found(ranks, is_busy):
    """Both ranks are on one host, so the difference is known, and the error must bound it."""
    first, second = ranks(2).run(cases.clock, 7.25, is_busy)
    assert first == (0.0, 0.0)
    offset, error = second
    assert abs(offset + 7.25) <= error + 2e-6  # A float of 1.8e9 s has a quarter of a microsecond.
    assert 0 < error < 2.0


@pytest.mark.slow
def test_workers_of_a_cluster_measure_it_too(ranks):
    _, (offset, error) = ranks(2, "multi_worker").run(cases.clock, -3.5, False)
    assert abs(offset - 3.5) <= error + 2e-6


def test_the_fastest_round_trip_counts():
    delays = iter([0.2, 0.0] + [0.05] * 100)
    clock = RemoteClock(lambda question: slowly(question))

    def slowly(question: dict) -> bool:
        time.sleep(next(delays))
        clock.hear(answer(question))
        return True

    reading = clock.read()
    assert abs(reading.offset) <= reading.error + 2e-6
    assert reading.error < 0.025


def test_without_an_answer_nothing_is_known():
    assert RemoteClock(lambda question: False).read() is None
