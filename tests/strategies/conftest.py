"""Fixtures of the strategies' tests."""

from collections.abc import Iterator

import pytest

from tests.strategies.parameter_server_cluster import ServerCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[ServerCluster]:
    """Two workers and two parameter servers, started once for many cases."""
    running = ServerCluster()
    yield running
    running.close()
