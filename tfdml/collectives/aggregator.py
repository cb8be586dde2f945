"""How the gradients of all processes become one sum: buckets for dense ones, rows for sparse."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.rows import add_up_rows

Gradient = tf.Tensor | tf.IndexedSlices


def sum_gradients(
    collective: Collective,
    gradients: Sequence[Gradient],
    name: str,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[Gradient]:
    """Sums gradients over all processes.

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
