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
