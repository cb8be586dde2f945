"""Checks that after a kill, the same program resumes from the checkpoint in a new cluster."""

import contextlib
import signal
import time

import pytest

from tests.harness.pool import RankFailure
from tests.harness.server_cluster import ServerCluster
from tests.strategies.compare import assert_close
from tests.strategies.parameter_server import restart_program as restart
from tests.strategies.parameter_server.test_faults import at_step

RESTORED = "all variables are restored from the newest checkpoint"


@contextlib.contextmanager
def started(servers: int = 2):
    """Returns a new cluster of two workers and some servers."""
    cluster = ServerCluster(servers=servers)
    try:
        yield cluster
    finally:
        cluster.close()


def _killed_and_resumed(directory, role: str, synchronous: bool, servers: int = 2) -> dict:
    with started() as cluster:
        at_step(directory, restart.KILLED_AT, lambda: cluster.send(role, 0, signal.SIGKILL))
        with pytest.raises(RankFailure) as failure:
            cluster.run(restart.train, str(directory), synchronous, True)
    if role == "ps":
        assert "ServerLostError: `fit` cannot continue" in failure.value.errors[0]
    with started(servers) as cluster:
        result = cluster.run(restart.train, str(directory), synchronous, False, servers)
    first = result["first_step"]
    assert 5 <= first < restart.STEPS, "within the epoch, at a saved step"
    assert first % 5 == 0
    return result["outcome"]


def assert_same(cluster: ServerCluster, directory, outcome: dict) -> None:
    """Checks that an outcome has the bits of a training without a kill."""
    whole = cluster.run(restart.train, str(directory / "whole"), True, False)
    assert whole["first_step"] == 0
    assert_close(whole["outcome"], outcome, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["ps", "chief"])
def test_synchronous_training_is_not_changed_by_a_kill(cluster, tmp_path, role):
    (tmp_path / "killed").mkdir()
    resumed = _killed_and_resumed(tmp_path / "killed", role, True)
    assert_same(cluster, tmp_path, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_a_training_goes_on_with_another_number_of_servers(cluster, tmp_path, servers):
    (tmp_path / "killed").mkdir()
    resumed = _killed_and_resumed(tmp_path / "killed", "ps", True, servers)
    assert_same(cluster, tmp_path, resumed)


def kill(cluster: ServerCluster, role: str, index: int) -> None:
    """Kills a process, and waits until it has ended."""
    cluster.send(role, index, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (role, index) not in cluster.codes and time.monotonic() < deadline:
        time.sleep(0.01)


def await_output(cluster: ServerCluster, text: str, seconds: float = 60.0) -> None:
    """Waits until the chief has printed a text."""
    deadline = time.monotonic() + seconds
    while text not in cluster.output("chief", 0) and time.monotonic() < deadline:
        time.sleep(0.01)


def _restored(directory, synchronous: bool, server: int = 0) -> dict:
    """Trains while a server is killed and started again; returns the outcome of the same `fit`."""
    directory.mkdir()
    with started() as cluster:

        def kill_and_start_again() -> None:
            cluster.send("ps", server, signal.SIGKILL)
            time.sleep(1)
            cluster.start("ps", server)

        at_step(directory, restart.KILLED_AT, kill_and_start_again)
        result = cluster.run(restart.train, str(directory), synchronous, True, 2, 60.0)
        said = cluster.output("chief", 0)
    assert f"fit waits for up to 60 s until parameter server {server} has been started" in said
    assert f"parameter server {server} is back." in said
    assert RESTORED in said
    # Steps after the checkpoint were taken twice.
    seen = result["seen"]
    back = next(i for i in range(1, len(seen)) if seen[i] <= seen[i - 1])
    assert seen[back] % 5 == 0
    assert result["first_step"] == 0
    assert result["lost"] == []
    # The chief is task 0 of its job, and no checkpoint has its variable.
    assert result["on_chief"] == ("/job:chief/replica:0/task:0/device:CPU:0", 7.0)
    return result["outcome"]


@pytest.mark.parametrize("server", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_lost_server_is_restored_within_the_job(cluster, tmp_path, server):
    restored = _restored(tmp_path / "killed", True, server)
    assert_same(cluster, tmp_path, restored)


@pytest.mark.slow
def test_an_asynchronous_training_goes_on_with_a_restored_server(tmp_path):
    result = _restored(tmp_path / "killed", False)
    assert result["iterations"] == restart.EPOCHS * restart.STEPS
    assert result["samples"] == [restart.STEPS * restart.BATCH] * restart.EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("first", ["worker", "ps"])
def test_a_lost_worker_does_not_hold_up_a_restored_server(cluster, tmp_path, first):
    order = [("worker", 1), ("ps", 0)]

    def kill_both() -> None:
        for role, index in order if first == "worker" else reversed(order):
            kill(running, role, index)
        running.start("ps", 0)
        await_output(running, RESTORED)
        running.start("worker", 1)

    with started() as running:
        at_step(tmp_path, restart.KILLED_AT, kill_both)
        restored = running.run(restart.train, str(tmp_path), True, True, 2, 60.0, 5, True)
        said = running.output("chief", 0)
    assert said.index(RESTORED) < said.index("worker 1 is back.")
    assert restored["workers_after"] == [0, 1]
    assert_same(cluster, tmp_path, restored["outcome"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["parameter server 0 has been started again", "parameter server 0 is back."]
)
def test_another_server_is_lost_before_the_first_is_restored(cluster, tmp_path, moment):
    def kill_both() -> None:
        kill(running, "ps", 0)
        if "is back" in moment:
            running.start("ps", 0)
        await_output(running, moment)
        kill(running, "ps", 1)
        if "is back" not in moment:
            running.start("ps", 0)
        running.start("ps", 1)

    with started() as running:
        at_step(tmp_path, restart.KILLED_AT, kill_both)
        restored = running.run(restart.train, str(tmp_path), True, True, 2, 60.0)
        said = running.output("chief", 0)
    assert "parameter server 1 is back." in said
    assert_same(cluster, tmp_path, restored["outcome"])


@pytest.mark.slow
def test_a_server_without_a_checkpoint_is_not_waited_for(tmp_path):
    with started() as cluster:
        at_step(tmp_path, restart.KILLED_AT, lambda: cluster.send("ps", 0, signal.SIGKILL))
        with pytest.raises(RankFailure) as failure:
            cluster.run(restart.train, str(tmp_path), True, True, 2, 60.0, 1000)
        said = cluster.output("chief", 0)
    assert "parameter server 0 cannot be restored, because this `fit` has no complete" in said
    assert "ServerLostError: `fit` cannot continue" in failure.value.errors[0]


@pytest.mark.slow
def test_a_server_that_does_not_come_back_ends_fit(tmp_path):
    with started() as cluster:
        at_step(tmp_path, restart.KILLED_AT, lambda: cluster.send("ps", 0, signal.SIGKILL))
        with pytest.raises(RankFailure) as failure:
            cluster.run(restart.train, str(tmp_path), True, True, 2, 5.0)
        said = cluster.output("chief", 0)
    assert "parameter server 0 has not been started again within `restart_limit`, 5 s." in said
    assert "ServerLostError: `fit` cannot continue" in failure.value.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["chief", "ps"])
def test_an_asynchronous_training_takes_each_step_once(tmp_path, role):
    result = _killed_and_resumed(tmp_path, role, False)
    assert result["iterations"] == restart.EPOCHS * restart.STEPS
    assert result["samples"] == [restart.STEPS * restart.BATCH] * restart.EPOCHS
