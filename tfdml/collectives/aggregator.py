"""Sums of gradients over all processes: dense ones in buckets, sparse ones by rows."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdml.collectives.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import Cut
from tfdml.collectives.sparse_gradients import (
    Gradient,
    add_up_rows,
    bytes_of_rows,
    rows_of_bytes,
)


class StepFactors(NamedTuple):
    """Loss scale and learning rate of a step.

    Attributes:
        loss_scale: The factor that the gradients contain, None for 1.
        learning_rate: The step's learning rate, None if unknown.
    """

    loss_scale: tf.Tensor | None = None
    learning_rate: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """An optimizer's gradients of one step.

    Attributes:
        values: The gradients, in the order of the layers; every caller has the same number, kinds,
            dtypes and (dense) shapes.
        names: The paths of the gradients' variables.
        label: Name of the exchanges.
        factors: Function that returns the loss scale and the learning rate. It is called only where
            they are used, because not every optimizer has a learning rate.
        devices: This process's device that exchanges each gradient and receives its sum; empty for
            the current device.
        places: For each gradient, the device of its variable in each of this process's replicas;
            empty if all are on the replicas' devices.
        cuts: Division of each gradient among the ranks, None for one that all ranks own; empty if
            no optimizer state is divided.
        may_overflow: Whether the gradients contain a loss scale, so that all ranks must see the
            same overflows.
        weight: The caller's part of the batch's rows, from 0 to 1, by which its mean gradient was
            multiplied: float64, shape `[]`. None if the aggregator does not ask for it.
        note_cut: Function that is told, in a step's graph, how much of each rank's gradient this
            caller has left out of its part of the result; None if nobody asks. See
            `OutlierWatch.note`.
    """

    values: Sequence[Gradient]
    names: Sequence[str]
    label: str
    factors: Callable[[], StepFactors] = StepFactors
    devices: Sequence[str] = ()
    places: Sequence[Sequence[str]] = ()
    cuts: Sequence[Cut | None] = ()
    may_overflow: bool = False
    weight: tf.Tensor | None = None
    note_cut: Callable[[tf.Tensor, tf.Tensor], None] | None = None

    def at(self, indices: Sequence[int]) -> "StepGradients":
        """Returns the gradients of the given indices.

        Args:
            indices: Indices of gradients, from 0.
        """
        return dataclasses.replace(
            self,
            values=[self.values[i] for i in indices],
            names=[self.names[i] for i in indices],
            devices=[self.devices[i] for i in indices] if self.devices else (),
            places=[self.places[i] for i in indices] if self.places else (),
            cuts=[self.cuts[i] for i in indices] if self.cuts else (),
        )


class GradientAggregator(abc.ABC):
    """Base class of objects that sum an optimizer's gradients, and keep state between steps.

    Each optimizer has its own aggregator, because the state belongs to the variables it trains.
    """

    # Whether each replica calls `aggregate` with its own gradients, in replica context. If not, the
    # process calls it once, with the sums of its replicas.
    per_replica = False
    # Whether `aggregate` needs to know each caller's `weight`.
    needs_weight = False

    @abc.abstractmethod
    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums gradients over all callers.

        Args:
            gradients: The caller's gradients.

        Returns:
            The sums, in the order of the gradients, bitwise identical for every caller.
        """

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns the dense gradients that are exchanged together, and so belong on one device.

        Args:
            gradients: A step's gradients; only their dtypes and shapes are used.
        """
        del gradients
        return []

    @property
    def state(self) -> dict[str, tf.Variable]:
        """This process's own variables that are kept between steps, by name."""
        return {}

    def state_bytes(self, gradients: StepGradients) -> dict[str, int]:
        """Returns the bytes of `state` after a step, by name, without creating it.

        Args:
            gradients: A step's gradients; only their dtypes and shapes are used.
        """
        del gradients
        return {}

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state of an earlier job's ranks.

        Args:
            before: Each process's `state` as arrays, in rank order, for any number of processes.
                Names that do not belong to this aggregator are ignored.

        Raises:
            ValueError: If a shape differs from this aggregator's; raised here, or when the
                variable is first used.
        """
        del before


class PlainAggregator(GradientAggregator):
    """Aggregator that sums gradients uncompressed, and has no state.

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

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums gradients over all processes; see `GradientAggregator`."""
        return sum_in_buckets(
            self._collective,
            gradients.values,
            f"{self._prefix}{gradients.label}",
            self._bucket_bytes,
            devices=gradients.devices,
        )

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns which gradients are exchanged together; see `GradientAggregator`."""
        return dense_buckets(gradients.values, self._bucket_bytes)


def sum_in_buckets(
    collective: Collective,
    gradients: Sequence[Gradient],
    name: str,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    devices: Sequence[str] = (),
) -> list[Gradient]:
    """Sums tensors, usually gradients, over all processes.

    Dense gradients are grouped into buckets. The exchange of a bucket starts as soon as its
    gradients are ready, while the backward pass computes the others. Sparse gradients
    (`tf.IndexedSlices`) are gathered, and equal rows are added up.

    Args:
        collective: Collective that moves tensors between processes.
        gradients: This process's gradients, in the order of the layers; every process has the same
            number, kinds, dtypes and (dense) shapes.
        name: Prefix of the exchanges' names, before `/bucket_0`, `/sparse_0`, …
        bucket_bytes: Bytes at which a bucket is closed.
        first_bucket_bytes: Bytes at which the first bucket is closed.
        devices: The device of each gradient, see `StepGradients`.

    Returns:
        The sums, in the order of `gradients`.
    """
    if collective.size == 1:
        return list(gradients)
    sums: list[Gradient | None] = [None] * len(gradients)
    for number, bucket in enumerate(dense_buckets(gradients, bucket_bytes, first_bucket_bytes)):
        group = [gradients[i] for i in bucket.indices]
        with on_device(devices, bucket.indices) as device:
            totals = collective.on(device).all_reduce(group, f"{name}/bucket_{number}")
        for i, total in zip(bucket.indices, totals, strict=True):
            sums[i] = total
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            with on_device(devices, [i]) as device:
                sums[i] = gather_rows_of(collective.on(device), gradient, f"{name}/sparse_{i}")
    return sums


def dense_buckets(
    gradients: Sequence[Gradient],
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Returns the buckets of the dense gradients.

    Args:
        gradients: The gradients, in the order of the layers.
        bucket_bytes: Bytes at which a bucket is closed.
        first_bucket_bytes: Bytes at which the first bucket is closed.
    """
    dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
    buckets = plan_buckets(
        [_nbytes(gradients[i]) for i in dense],
        [gradients[i].dtype for i in dense],
        bucket_bytes,
        first_bucket_bytes,
    )
    return [Bucket([dense[i] for i in b.indices], b.nbytes) for b in buckets]


@contextlib.contextmanager
def on_device(devices: Sequence[str], indices: Sequence[int]) -> Iterator[str | None]:
    """Context manager: operations are placed on the device of the first of the given gradients.

    Args:
        devices: The device of each gradient; empty for the current device.
        indices: Indices of the gradients.

    Yields:
        The device's name, None for the current device.
    """
    if not devices:
        yield None
        return
    with tf.device(devices[indices[0]]):
        yield devices[indices[0]]


def gather_rows_of(collective: Collective, own: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
    """Sums a sparse gradient over all processes, by gathering the rows of all.

    Args:
        collective: Collective that moves tensors between processes.
        own: This process's gradient.
        name: Name of the exchange.
    """
    rows = collective.all_gather(bytes_of_rows(own), name)
    return add_up_rows(rows_of_bytes(rows, own))


def sum_packed(collective: Collective, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Sums small tensors over all processes, packed into one vector per dtype.

    Args:
        collective: Collective that moves tensors between processes.
        tensors: Tensors of known shapes.
        name: Prefix of the exchanges' names, before `/float32`, …

    Returns:
        The sums, in the order of `tensors`.
    """
    sums: list[tf.Tensor | None] = [None] * len(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        packed = tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], 0)
        (total,) = collective.all_reduce([packed], f"{name}/{dtype.name}")
        sizes = [tensors[i].shape.num_elements() for i in indices]
        for i, part in zip(indices, tf.split(total, sizes), strict=True):
            sums[i] = tf.reshape(part, tensors[i].shape)
    return sums


def _nbytes(gradient: tf.Tensor) -> int:
    # A gradient of unknown size counts as 0 bytes, so it shares the bucket of its neighbours.
    return (gradient.shape.num_elements() or 0) * gradient.dtype.size
