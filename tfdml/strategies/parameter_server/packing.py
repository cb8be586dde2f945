"""A step's results as one vector: each tensor would be a message of its own to the chief."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns numbers of any dtype as one vector: float64, which holds float32 and counts exactly.

    Args:
        tensors: Of static shapes.
    """
    if not tensors:
        return tf.zeros([0], tf.float64)
    return tf.concat([tf.reshape(tf.cast(t, tf.float64), [-1]) for t in tensors], 0)


def unpack(vector: tf.Tensor, like: Sequence) -> list[tf.Tensor]:
    """Returns the tensors of a vector.

    Args:
        vector: What `pack` returned, or a sum of such vectors.
        like: Variables of the shapes and dtypes that were packed.
    """
    sizes = [int(np.prod(v.shape)) for v in like]
    parts = tf.split(vector, sizes) if sizes else []
    return [tf.cast(tf.reshape(p, v.shape), v.dtype) for p, v in zip(parts, like, strict=True)]
