"""Runs the replica-invariance contract through the compression seam with an identity codec."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

from tests.compression.test_compressed_aggregator import Identity
from tests.harness import rank_job
from tests.harness.pool import RankPools
from tests.strategies.contract.test_replica_invariance import *  # noqa: F403
from tfdml.compression.codecs.packing import bytes_to_floats, floats_to_bytes
from tfdml.compression.compressor import ChunkCompressor

pytestmark = pytest.mark.slow


class IdentityOfAll(Identity):
    """Identity codec that accepts every dense gradient, including small ones and vectors."""

    def takes(self, shape: Sequence[int], dtype: tf.DType) -> bool:
        return dtype == tf.float32


class IdentityInBytes(ChunkCompressor):
    """Identity codec for workers of parameter servers, which push bytes and have no residuals."""

    biased = False

    def takes(self, shape: Sequence[int], dtype: tf.DType) -> bool:
        return dtype == tf.float32

    def row_bytes(self, length: int) -> int:
        return 4 * length

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return floats_to_bytes(values)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        return bytes_to_floats(payload, tf.float32)


def with_identity(case: Callable, *args: Any) -> Any:
    """Runs a case on a rank, with the identity codec in all strategies."""
    plain = rank_job.strategy
    identity = IdentityInBytes() if rank_job.KIND == "parameter_server" else IdentityOfAll()
    rank_job.strategy = lambda devices=1, **options: plain(
        devices, **{"compression": identity} | options
    )
    try:
        return case(*args)
    finally:
        rank_job.strategy = plain


class PoolsWithIdentity:
    """Pools of ranks that run each case with the codec."""

    def __init__(self, pools: RankPools):
        self._pools = pools

    def __call__(self, size: int, kind: str = "horovod") -> "PoolsWithIdentity.Pool":
        return self.Pool(self._pools(size, kind))

    def run_sizes(self, sizes, case, *args, kind="horovod", **kwargs) -> dict:
        return self._pools.run_sizes(sizes, with_identity, case, *args, kind=kind, **kwargs)

    class Pool:
        """A pool whose cases use the codec."""

        def __init__(self, pool):
            self._pool = pool

        def run(self, case, *args, **kwargs) -> list:
            return self._pool.run(with_identity, case, *args, **kwargs)


@pytest.fixture(scope="session")
def ranks(ranks: RankPools) -> PoolsWithIdentity:
    """Overrides the contract's `ranks`."""
    return PoolsWithIdentity(ranks)
