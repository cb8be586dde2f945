"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from tests.harness.pool import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of real ranks: `ranks(2).run(case, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session", params=["horovod", "mirrored", "multi_worker"])
def kind(request) -> str:
    """The strategy that a case runs under."""
    return request.param


@pytest.fixture(
    scope="session",
    params=[
        "horovod",
        pytest.param("mirrored", marks=pytest.mark.slow),
        pytest.param("multi_worker", marks=pytest.mark.slow),
    ],
)
def feature_kind(request) -> str:
    """The same for what differs little between strategies: all but one are slow tests."""
    return request.param
