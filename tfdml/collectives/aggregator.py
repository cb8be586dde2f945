"""Sums the gradients of all processes: in buckets if they are dense, by rows if they are sparse."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdml.collectives.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.rows import add_up_rows

Gradient = tf.Tensor | tf.IndexedSlices


class Rates(NamedTuple):
    """The numbers of a step that its gradients are to be seen with.

    Attributes:
        loss_scale: The factor that the gradients contain, None for 1.
        learning_rate: The rate of this step, None where it is not known.
    """

    loss_scale: tf.Tensor | None = None
    learning_rate: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """An optimizer's gradients of one step.

    Attributes:
        values: The gradients, in the order of the layers; the same for every caller in number,
            kind, dtype and (dense) shape.
        names: Their variables' paths.
        label: The name of their exchanges.
        rates: Returns the loss scale and the learning rate. Only what uses them calls it, because
            not every optimizer has a rate.
    """

    values: Sequence[Gradient]
    names: Sequence[str]
    label: str
    rates: Callable[[], Rates] = Rates

    def at(self, places: Sequence[int]) -> "StepGradients":
        """Returns some of the gradients.

        Args:
            places: Their numbers, from 0.
        """
        return dataclasses.replace(
            self, values=[self.values[i] for i in places], names=[self.names[i] for i in places]
        )


class GradientAggregator(abc.ABC):
    """Sums an optimizer's gradients, and keeps what its way of summing leaves over.

    Each optimizer has one of its own: what is kept belongs to the variables that it trains.
    """

    # Whether each replica calls `aggregate` with its own gradients, in replica context; else the
    # process calls it once, with the sums of its replicas.
    per_replica = False

    @abc.abstractmethod
    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums gradients over all that exchange them.

        Args:
            gradients: The caller's.

        Returns:
            The sums, in the order of the gradients: the same bits for every caller.
        """

    @property
    def state(self) -> dict[str, tf.Variable]:
        """The variables that are kept between steps, by name: this process's own."""
        return {}

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues with what the ranks of an earlier job have kept.

        Args:
            before: Each process's `state` as arrays, in their order, however many they were.
                Names that are not of this aggregator are left alone.

        Raises:
            ValueError: If something has another shape than what is kept here: then, or when it is
                first used.
        """
        del before


class PlainAggregator(GradientAggregator):
    """Sums gradients as they are, and keeps nothing.

    Args:
        collective: What moves them.
        bucket_bytes: Bytes of gradients that are exchanged together.
        prefix: The beginning of the exchanges' names.
    """

    def __init__(
        self, collective: Collective, bucket_bytes: int = BUCKET_BYTES, prefix: str = ""
    ) -> None:
        self._collective = collective
        self._bucket_bytes = bucket_bytes
        self._prefix = prefix

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums gradients over all processes; see `GradientAggregator`."""
        name = f"{self._prefix}{gradients.label}"
        return sum_in_buckets(self._collective, gradients.values, name, self._bucket_bytes)


def sum_in_buckets(
    collective: Collective,
    gradients: Sequence[Gradient],
    name: str,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[Gradient]:
    """Sums tensors, as a rule gradients, over all processes.

    Dense gradients go in buckets, each a group of its own that starts as soon as its gradients
    are there, while the backward pass computes the others. Sparse ones (`tf.IndexedSlices`) are
    gathered, and each row added up.

    Args:
        collective: What moves them.
        gradients: This process's gradients, in the order of the layers; the same on every
            process in number, kind, dtype and (dense) shape.
        name: What the exchanges are called, before `/bucket_0`, `/sparse_0`, …
        bucket_bytes: Bytes at which a bucket is closed.
        first_bucket_bytes: Bytes at which the first bucket is closed.

    Returns:
        The sums, in the order of `gradients`.
    """
    if collective.size == 1:
        return list(gradients)
    sums: list[Gradient | None] = [None] * len(gradients)
    dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
    buckets = plan_buckets(
        [_nbytes(gradients[i]) for i in dense],
        [gradients[i].dtype for i in dense],
        bucket_bytes,
        first_bucket_bytes,
    )
    for number, bucket in enumerate(buckets):
        places = [dense[i] for i in bucket.indices]
        group = [gradients[i] for i in places]
        for i, total in zip(
            places, collective.all_reduce(group, f"{name}/bucket_{number}"), strict=True
        ):
            sums[i] = total
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            gathered = tf.IndexedSlices(
                collective.all_gather(gradient.values, f"{name}/sparse_{i}_values"),
                collective.all_gather(gradient.indices, f"{name}/sparse_{i}_indices"),
                gradient.dense_shape,
            )
            sums[i] = add_up_rows(gathered)
    return sums


def sum_packed(collective: Collective, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Sums small tensors over all processes: those of a dtype travel as one vector.

    Args:
        collective: What moves them.
        tensors: Tensors of known shapes.
        name: What the exchange is called, before `/float32`, …

    Returns:
        The sums, in the order of `tensors`.
    """
    sums: list[tf.Tensor | None] = [None] * len(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        packed = tf.concat([tf.reshape(tensors[i], [-1]) for i in places], 0)
        (total,) = collective.all_reduce([packed], f"{name}/{dtype.name}")
        sizes = [tensors[i].shape.num_elements() for i in places]
        for i, part in zip(places, tf.split(total, sizes), strict=True):
            sums[i] = tf.reshape(part, tensors[i].shape)
    return sums


def _nbytes(gradient: tf.Tensor) -> int:
    # A gradient of unknown size counts as nothing: it shares the bucket of its neighbours.
    return (gradient.shape.num_elements() or 0) * gradient.dtype.size
