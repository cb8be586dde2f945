"""Packing of a step's results into one vector, which saves the chief a message per tensor."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Packs tensors of any dtype into a float64 vector, which holds float32 and counts exactly.

    Args:
        tensors: Tensors with static shapes.
    """
    if not tensors:
        return tf.zeros([0], tf.float64)
    return tf.concat([tf.reshape(tf.cast(t, tf.float64), [-1]) for t in tensors], 0)


def unpack(vector: tf.Tensor, like: Sequence) -> list[tf.Tensor]:
    """Returns the tensors of a vector.

    Args:
        vector: Result of `pack`, or a sum of such vectors.
        like: Variables with the shapes and dtypes of the packed tensors.
    """
    sizes = [int(np.prod(v.shape)) for v in like]
    parts = tf.split(vector, sizes) if sizes else []
    return [tf.cast(tf.reshape(p, v.shape), v.dtype) for p, v in zip(parts, like, strict=True)]
