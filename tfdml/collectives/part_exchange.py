"""Exchange of variables in parts: sums of gradients to their owners, new values to everyone.

An all-reduce is these two exchanges one after the other. Between them each owner updates its part,
so sharded training sends the same bytes.

Reference:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    arXiv:1910.02054.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import (
    GradientAggregator,
    StepGradients,
    dense_buckets,
    gather_rows_of,
    on_device,
)
from tfdml.collectives.buckets import BUCKET_BYTES, Bucket, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import Cut
from tfdml.collectives.sparse_gradients import Gradient, times, values_of, with_values


class PartAggregator(GradientAggregator):
    """Aggregator that sums each gradient on the rank that owns it, and has no state.

    A gradient that all ranks own (its cut is None) is summed on all of them, from the same message.

    Args:
        collective: Collective that moves tensors between processes.
        bucket_bytes: Bytes of gradients that are exchanged together.
        prefix: Prefix of the exchanges' names.
    """

    def __init__(
        self, collective: Collective, bucket_bytes: int = BUCKET_BYTES, prefix: str = ""
    ) -> None:
        self._collective = collective
        self._bucket_bytes = bucket_bytes
        self._prefix = prefix

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns which gradients are exchanged together; see `GradientAggregator`."""
        return dense_buckets(gradients.values, self._bucket_bytes)

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Returns the sums of this rank's parts of the gradients.

        Args:
            gradients: The caller's gradients, whole, with their cuts.
        """
        sums, received = self.sums(gradients)
        sums = after_all(received, sums)
        if gradients.may_overflow:
            label = f"{self._prefix}{gradients.label}"
            sums, _ = nan_unless_finite(self._collective, sums, all_finite(sums), label)
        return sums

    def sums(self, gradients: StepGradients) -> tuple[list[Gradient], list[tf.Tensor]]:
        """Returns the sums, and a tensor from each exchange; see `after_all`."""
        values, cuts, rank = gradients.values, gradients.cuts, self._collective.rank
        sums: list[Gradient | None] = [None] * len(values)
        received: list[tf.Tensor] = []
        label = f"{self._prefix}{gradients.label}"
        for number, bucket in enumerate(self.buckets(gradients)):
            with on_device(gradients.devices, bucket.indices) as device:
                total, totals = _sum_parts(
                    self._collective.on(device),
                    [values[i] for i in bucket.indices],
                    [cuts[i] for i in bucket.indices],
                    f"{label}/parts_{number}",
                )
            received.append(total)
            for i, own in zip(bucket.indices, totals, strict=True):
                sums[i] = own
        for i, gradient in enumerate(values):
            if isinstance(gradient, tf.IndexedSlices):
                with on_device(gradients.devices, [i]) as device:
                    name = f"{label}/sparse_{i}"
                    total = gather_rows_of(self._collective.on(device), gradient, name)
                    sums[i] = total if cuts[i] is None else own_rows(total, cuts[i], rank)
                    received.append(total.values)
        return sums, received


def all_finite(sums: Sequence[Gradient]) -> tf.Tensor:
    """Returns whether all of this rank's sums are finite: bool, shape `[]`."""
    finite = [tf.reduce_all(tf.math.is_finite(values_of(total))) for total in sums]
    return tf.reduce_all(tf.stack(finite))


def nan_unless_finite(
    collective: Collective, sums: Sequence[Gradient], finite: tf.Tensor, label: str
) -> tuple[list[Gradient], tf.Tensor]:
    """Makes all sums NaN on all ranks if some are not finite on any.

    Args:
        collective: Collective that moves tensors between processes.
        sums: This rank's sums.
        finite: Whether they are finite: bool, shape `[]`.
        label: Name of the exchanges.

    Returns:
        The sums, and whether those of all ranks are finite.
    """
    overflows = tf.cast(tf.logical_not(finite), tf.int32)
    votes = collective.all_reduce([tf.reshape(overflows, [1])], f"{label}/overflow")[0]
    factor = tf.where(votes[0] > 0, math.nan, 1.0)
    return [times(total, factor) for total in sums], votes[0] == 0


def _sum_parts(
    collective: Collective, group: Sequence[tf.Tensor], cuts: Sequence[Cut | None], name: str
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the sums of this rank's parts of tensors of one dtype, packed and one by one."""
    ranks, own = collective.size, collective.rank
    sizes = [_sizes(tensor, cut, ranks) for tensor, cut in zip(group, cuts, strict=True)]
    pieces = [
        [tf.reshape(tensor, [-1])] * ranks
        if cut is None
        else tf.split(tf.reshape(tensor, [-1]), cut.sizes)
        for tensor, cut in zip(group, cuts, strict=True)
    ]
    if len(group) == 1 and cuts[0] is not None:
        packed = tf.reshape(group[0], [-1])
    else:
        packed = tf.concat([piece[rank] for rank in range(ranks) for piece in pieces], 0)
    counts = [sum(size[rank] for size in sizes) for rank in range(ranks)]
    if not all(counts):
        # A rank that owns nothing gets one number: its result is not empty then; see `after_all`.
        chunks = tf.split(packed, counts)
        packed = tf.concat([c if n else packed[:1] for c, n in zip(chunks, counts, strict=True)], 0)
        counts = [max(count, 1) for count in counts]
    received = tf.unstack(collective.all_to_all_rows(packed, counts, name))
    # Added in the order of the ranks, so that the sums of what all own are the same everywhere.
    wide = tf.float32 if group[0].dtype == tf.bfloat16 else group[0].dtype
    total = tf.cast(received[0], wide)
    for more in received[1:]:
        total += tf.cast(more, wide)
    total = tf.cast(total, group[0].dtype)
    own_sizes = [size[own] for size in sizes]
    parts = tf.split(total[: sum(own_sizes)], own_sizes)
    shapes = [
        tensor.shape if cut is None else cut.part_shape(own)
        for tensor, cut in zip(group, cuts, strict=True)
    ]
    return total, [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def after_all(received: Sequence[tf.Tensor], sums: list[Gradient]) -> list[Gradient]:
    """Returns the sums, of which a small one needs the results of all exchanges.

    TensorFlow would drop an exchange from a rank's graph if the rank owns nothing of what it sums,
    and the other ranks would wait for it. Only the use of its value prevents that: a control
    dependency is optimized away.

    Args:
        received: A tensor from each exchange.
        sums: This rank's sums.
    """
    sizes = [values_of(total).shape.num_elements() or math.inf for total in sums]
    index = sizes.index(min(sizes))
    # Always true, but TensorFlow cannot know.
    arrived = tf.reduce_all(tf.stack([_is_there(t) for t in received]))
    values = values_of(sums[index])
    values = tf.where(arrived, values, tf.zeros_like(values))
    return [*sums[:index], with_values(sums[index], values), *sums[index + 1 :]]


def _is_there(tensor: tf.Tensor) -> tf.Tensor:
    """Returns True, computed from a tensor's first number, or its size if it may have none."""
    if not tensor.shape.num_elements():
        return tf.size(tensor) >= 0
    first = tf.reshape(tensor, [-1])[0]
    return tf.logical_or(tf.math.is_nan(first), tf.abs(first) >= 0)


def gather_parts(
    collective: Collective,
    parts: Sequence[tf.Tensor],
    cuts: Sequence[Cut],
    name: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[tf.Tensor]:
    """Returns whole tensors, of which each rank has the part that it owns.

    Args:
        collective: Collective that moves tensors between processes.
        parts: This rank's parts.
        cuts: Their cuts, the same on all ranks.
        name: Prefix of the exchanges' names.
        bucket_bytes: Bytes of whole tensors that are gathered together.
    """
    wholes: list[tf.Tensor | None] = [None] * len(parts)
    nbytes = [sum(cut.sizes) * part.dtype.size for part, cut in zip(parts, cuts, strict=True)]
    buckets = plan_buckets(nbytes, [part.dtype for part in parts], bucket_bytes)
    for number, (indices, _) in enumerate(buckets):
        packed = tf.concat([tf.reshape(parts[i], [-1]) for i in indices], 0)
        sizes = [[cuts[i].sizes[rank] for i in indices] for rank in range(collective.size)]
        counts = [sum(of_rank) for of_rank in sizes]
        gathered = collective.all_gather_rows(packed, counts, f"{name}/whole_{number}")
        pieces = tf.split(gathered, [size for of_rank in sizes for size in of_rank])
        for position, i in enumerate(indices):
            of_variable = pieces[position :: len(indices)]
            wholes[i] = tf.reshape(tf.concat(of_variable, 0), cuts[i].shape)
    return wholes


def _sizes(tensor: tf.Tensor, cut: Cut | None, ranks: int) -> list[int]:
    return [tensor.shape.num_elements()] * ranks if cut is None else cut.sizes


def own_rows(gradient: tf.IndexedSlices, cut: Cut, rank: int) -> Gradient:
    """Returns the rows of a sparse gradient that a rank owns, counted from its first one.

    Args:
        gradient: A sparse gradient, the same on all ranks.
        cut: The division of its variable.
        rank: The rank.
    """
    if cut.row_shape != cut.shape[1:]:
        return cut.part_of(tf.convert_to_tensor(gradient), rank)
    first, end = cut.bounds[rank : rank + 2]
    own = tf.logical_and(gradient.indices >= first, gradient.indices < end)
    shape = tf.constant(cut.part_shape(rank), tf.int64)
    return tf.IndexedSlices(
        tf.boolean_mask(gradient.values, own), tf.boolean_mask(gradient.indices, own) - first, shape
    )
