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
    first = result.pop("first_step")
    del result["seen"], result["lost"]
    assert 5 <= first < restart.STEPS, "within the epoch, at a saved step"
    assert first % 5 == 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize("role", ["ps", "chief"])
def test_synchronous_training_is_not_changed_by_a_kill(cluster, tmp_path, role):
    (tmp_path / "killed").mkdir()
    resumed = _killed_and_resumed(tmp_path / "killed", role, True)
    whole = cluster.run(restart.train, str(tmp_path / "whole"), True, False)
    assert whole.pop("first_step") == 0
    del whole["seen"], whole["lost"]
    assert_close(whole, resumed, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_a_training_goes_on_with_another_number_of_servers(cluster, tmp_path, servers):
    (tmp_path / "killed").mkdir()
    resumed = _killed_and_resumed(tmp_path / "killed", "ps", True, servers)
    whole = cluster.run(restart.train, str(tmp_path / "whole"), True, False)
    assert whole.pop("first_step") == 0
    del whole["seen"], whole["lost"]
    assert_close(whole, resumed, rtol=0, atol=0)


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
    assert "the steps since then are taken again" in said
    # Steps after the checkpoint were taken twice.
    seen = result.pop("seen")
    back = next(i for i in range(1, len(seen)) if seen[i] <= seen[i - 1])
    assert seen[back] % 5 == 0
    assert result.pop("first_step") == 0
    assert result.pop("lost") == []
    return result


@pytest.mark.parametrize("server", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_lost_server_is_restored_within_the_job(cluster, tmp_path, server):
    restored = _restored(tmp_path / "killed", True, server)
    whole = cluster.run(restart.train, str(tmp_path / "whole"), True, False)
    del whole["first_step"], whole["seen"], whole["lost"]
    assert_close(whole, restored, rtol=0, atol=0)


@pytest.mark.slow
def test_an_asynchronous_training_goes_on_with_a_restored_server(tmp_path):
    result = _restored(tmp_path / "killed", False)
    assert result["iterations"] == restart.EPOCHS * restart.STEPS
    assert result["samples"] == [restart.STEPS * restart.BATCH] * restart.EPOCHS


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
