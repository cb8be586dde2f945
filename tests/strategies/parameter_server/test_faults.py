"""Checks killed workers, servers and chiefs on clusters of real processes."""

import signal
import threading
import time

import pytest

from tests.harness.pool import RankFailure
from tests.harness.server_cluster import ServerCluster
from tests.strategies.parameter_server import fault_cases as faults


@pytest.fixture
def cluster():
    running = ServerCluster(workers=2, servers=1)
    yield running
    running.close()


def appears(path, seconds: float = 120) -> bool:
    """Waits for a file; returns whether it appeared."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def at_step(directory, step: int, action) -> threading.Thread:
    """Calls a function when the case has reached a step."""

    def wait_and_act() -> None:
        appears(directory / f"step{step}")
        action()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def test_a_killed_worker_is_tolerated_and_rejoins(cluster, tmp_path):
    def kill_and_start_again() -> None:
        cluster.send("worker", 1, signal.SIGKILL)
        time.sleep(1)
        cluster.start("worker", 1)

    at_step(tmp_path, 20, kill_and_start_again)
    result = cluster.run(faults.fit_until_worker_is_back, str(tmp_path))
    assert result["iterations"] >= result["steps"], "a retried step may count twice, none is lost"
    assert result["samples"] == result["steps"] * faults.BATCH, "each step counts once in metrics"
    assert result["returned"] == 1
    assert result["workers_after"] == [0, 1]
    assert "worker 1 is lost: its process has ended" in cluster.output("chief", 0)
    assert "worker 1 is back" in cluster.output("chief", 0)


def test_a_killed_server_ends_fit_with_its_name(cluster, tmp_path):
    at_step(tmp_path, 20, lambda: cluster.send("ps", 0, signal.SIGKILL))
    message = cluster.run(faults.fit_for_ever, str(tmp_path))
    assert "ServerLostError: `fit` cannot continue, because parameter server 0" in message


def test_a_killed_chief_ends_workers_and_servers(cluster, tmp_path):
    at_step(tmp_path, 20, lambda: cluster.send("chief", 0, signal.SIGKILL))
    with pytest.raises(RankFailure):
        cluster.run(faults.fit_for_ever, str(tmp_path))
    deadline = time.monotonic() + 20
    while len(cluster.codes) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cluster.codes == {("worker", 0): 70, ("worker", 1): 70, ("ps", 0): 70}
    assert "is lost: its process has ended" in cluster.output("worker", 0)


def test_a_worker_that_never_comes_is_named():
    cluster = ServerCluster(workers=2, servers=1, absent=[("worker", 1)])
    try:
        message = cluster.run(faults.start_without_all)
    finally:
        cluster.close()
    assert "`start_limit`, 2 s. Received: nothing from worker 1 (127.0.0.1:" in message
    assert "worker 0" not in message


def test_stopped_worker_does_not_block_the_others(cluster, tmp_path):
    went_on = []

    def stop_again_and_again() -> None:
        try:
            # The worst moment is a stop while the chief releases the worker's resources.
            for step in range(60, 780, 60):
                appears(tmp_path / f"step{step}")
                cluster.send("worker", 1, signal.SIGSTOP)
                went_on.append(appears(tmp_path / f"step{step + 40}", 20))
                cluster.send("worker", 1, signal.SIGCONT)
        finally:
            (tmp_path / "enough").touch()

    at_step(tmp_path, 20, stop_again_and_again)
    result = cluster.run(faults.fit_until_enough, str(tmp_path))
    assert went_on == [True] * 12, "others took 40 steps while the worker stood still"
    assert result["iterations"] == result["steps"]
