"""Checks the harness: a case that hangs, dies or raises is ended and named, without leftovers."""

import os
import signal
import time

import pytest

from tests.harness.pool import RankFailure, RankPool
from tfdml.runtime.launch.processes import alive


def _rank_and_size() -> tuple[int, int]:
    import horovod.tensorflow as hvd

    hvd.init()
    return hvd.rank(), hvd.size()


def _hang_on_rank_1() -> None:
    from tfdml.topology import launched

    if launched().rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("rank 1 sleeps now", flush=True)
        time.sleep(600)


def _die_on_rank_0() -> None:
    from tfdml.topology import launched

    if launched().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _raise() -> None:
    raise ValueError("raised by every rank")


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()
    assert alive(pool.pids) == []


def test_every_rank_runs_the_case(pool):
    assert pool.run(_rank_and_size) == [(0, 2), (1, 2)]


def test_ranks_are_reused_if_all_raise(pool):
    pool.run(_rank_and_size)
    pids = list(pool.pids)
    with pytest.raises(RankFailure, match="raised by every rank") as failure:
        pool.run(_raise)
    assert sorted(failure.value.errors) == [0, 1]
    assert pool.pids == pids
    assert pool.run(_rank_and_size) == [(0, 2), (1, 2)]


def test_a_hung_rank_that_ignores_sigterm_is_killed_and_named(pool):
    pool.run(_rank_and_size)
    pids = list(pool.pids)
    with pytest.raises(RankFailure, match=r"ranks \[1\] did not answer") as failure:
        pool.run(_hang_on_rank_1, timeout=2.0)
    assert "rank 1 sleeps now" in str(failure.value)
    assert alive(pids) == []
    assert pool.run(_rank_and_size) == [(0, 2), (1, 2)], "The next case gets new ranks."


def test_a_dead_rank_ends_the_case_before_its_time_limit(pool):
    pool.run(_rank_and_size)
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="died"):
        pool.run(_die_on_rank_0, timeout=300.0)
    assert time.monotonic() - begin < 60
