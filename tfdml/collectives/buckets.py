"""Buckets: groups of gradients that are exchanged together, their order and their devices."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import tensorflow as tf

# The backward pass yields the last layer's gradients first. A small first bucket lets the exchange
# start early; the others are large enough to use the link's bandwidth.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20


Device = TypeVar("Device", str, int)


class Bucket(NamedTuple):
    """Gradients of one dtype that are exchanged as one group.

    Attributes:
        indices: Indices in the list of gradients.
        nbytes: Bytes of all its gradients.
    """

    indices: list[int]
    nbytes: int


def plan_buckets(
    nbytes: Sequence[int],
    dtypes: Sequence[tf.DType],
    limit: int = BUCKET_BYTES,
    first_limit: int = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Groups gradients into buckets, from the last layer to the first.

    A bucket is closed as soon as it has reached its limit, or when the next gradient has another
    dtype. So a layer's small bias is sent with a large kernel, not alone.

    Args:
        nbytes: Bytes of each gradient, in the order of the layers.
        dtypes: The gradients' dtypes.
        limit: Bytes at which a bucket is closed.
        first_limit: Bytes at which the bucket that is ready first is closed, if fewer.

    Returns:
        The buckets, in the order in which the backward pass fills them.

    Raises:
        ValueError: If a limit is not positive.

    Reference:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
        VLDB 2020, section 3.2.
    """
    if limit < 1 or first_limit < 1:
        raise ValueError(
            f"`limit` and `first_limit` must be positive numbers of bytes. Received: "
            f"limit={limit}, first_limit={first_limit}."
        )
    first_limit = min(first_limit, limit)
    buckets: list[Bucket] = []
    indices: list[int] = []
    filled = 0
    for i in reversed(range(len(nbytes))):
        full = filled >= (limit if buckets else first_limit)
        if indices and (full or dtypes[i] != dtypes[indices[0]]):
            buckets.append(Bucket(indices, filled))
            indices, filled = [], 0
        indices.append(i)
        filled += nbytes[i]
    if indices:
        buckets.append(Bucket(indices, filled))
    return buckets


def spread(buckets: Sequence[Bucket], count: int, devices: Sequence[Device]) -> list[Device]:
    """Assigns each bucket to a device of the process, which sums and exchanges it for all devices.

    With L devices and buckets of equal bytes, each device receives (L-1)/L of the gradients and
    sends as much, and the same again for the sums: a reduce-scatter and an all-gather. A single
    device that did it for all would receive and send L-1 times the gradients.

    Args:
        buckets: The buckets, in the order in which they are exchanged.
        count: The number of gradients.
        devices: The process's devices, by name or number.

    Returns:
        Each gradient's device: that of its bucket. Gradients without a bucket, which are sparse,
        are assigned in turns.
    """
    spread_over = [devices[i % len(devices)] for i in range(count)]
    loads = dict.fromkeys(devices, 0)
    for bucket in buckets:
        device = min(loads, key=loads.__getitem__)
        loads[device] += bucket.nbytes
        for i in bucket.indices:
            spread_over[i] = device
    return spread_over
