"""Checks that recipes which say so give one process's model on several, to float64's rounding."""

import pytest

from tests.recipes import equality_cases as cases
from tests.strategies.compare import assert_invariant

EXACT = {"rtol": 1e-9, "atol": 1e-9}


JOBS = [("horovod", 2), ("multi_worker", 2), ("mirrored", 3)]


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# tests/strategies covers by default what these use.
@pytest.mark.parametrize(
    ("case", "kind", "size"),
    [
        (case, *job) if case is cases.gan and job == JOBS[0] else _slow(case, *job)
        for case in (cases.gan, cases.detection, cases.time_series)
        for job in JOBS
    ],
)
def test_several_processes_equal_one(ranks, case, kind, size):
    assert_invariant(ranks.run_sizes((1, size), case, kind=kind), **EXACT)
