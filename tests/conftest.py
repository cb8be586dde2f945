"""Fixtures shared by all tests."""

import signal
from collections.abc import Iterator

import pytest

# Fixtures are registered where they are imported.
from tests.harness.command import commands, environment_without, tfdml_command  # noqa: F401
from tests.harness.pool import RankPools
from tests.harness.server_cluster import ServerCluster

# A shell that runs the tests in the background makes its processes ignore Ctrl-C, which children
# inherit. Tests send it to children, as a terminal would.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of real ranks: `ranks(2).run(case, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[ServerCluster]:
    """Two workers and two parameter servers, started once for many cases."""
    running = ServerCluster()
    yield running
    running.close()


# `test_parameter_server_synchronous` has the core of the contract by default.
_SERVERS = pytest.param("parameter_server", marks=pytest.mark.slow)


@pytest.fixture(scope="session", params=["horovod", "mirrored", "multi_worker", _SERVERS])
def kind(request) -> str:
    """Returns the strategy that a case runs under."""
    return request.param


@pytest.fixture(
    scope="session",
    params=[
        "horovod",
        pytest.param("mirrored", marks=pytest.mark.slow),
        pytest.param("multi_worker", marks=pytest.mark.slow),
        _SERVERS,
    ],
)
def feature_kind(request) -> str:
    """The same for cases that differ little between strategies: all but one are slow tests."""
    return request.param
