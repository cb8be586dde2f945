"""Checks that after a kill, the same program resumes from the checkpoint in a new cluster."""

import contextlib
import signal

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
    assert_close(whole, resumed, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_a_training_goes_on_with_another_number_of_servers(cluster, tmp_path, servers):
    (tmp_path / "killed").mkdir()
    resumed = _killed_and_resumed(tmp_path / "killed", "ps", True, servers)
    whole = cluster.run(restart.train, str(tmp_path / "whole"), True, False)
    assert whole.pop("first_step") == 0
    assert_close(whole, resumed, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["chief", "ps"])
def test_an_asynchronous_training_takes_each_step_once(tmp_path, role):
    result = _killed_and_resumed(tmp_path, role, False)
    assert result["iterations"] == restart.EPOCHS * restart.STEPS
    assert result["samples"] == [restart.STEPS * restart.BATCH] * restart.EPOCHS
