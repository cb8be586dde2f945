"""Which gradients travel together, and in which order."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# The backward pass yields the last layer's gradients first. A small first bucket lets the exchange
# start early; the others are large enough to use the link's bandwidth.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20


class Bucket(NamedTuple):
    """Gradients of one dtype that are exchanged as one group.

    Attributes:
        indices: Places in the list of gradients.
        nbytes: Bytes of all of them.
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

    A bucket is closed as soon as it holds its limit of bytes, or when the next gradient is of
    another dtype. So a layer's small bias travels with a large kernel, not alone.

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
