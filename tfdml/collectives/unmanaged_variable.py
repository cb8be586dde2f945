"""Variables on a single device, which no strategy mirrors, aggregates or saves."""

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def unmanaged_variable(start: tf.Tensor) -> tf.Variable:
    """Returns a variable on the current device alone, in whatever strategy's scope it is created.

    Args:
        start: Initial value.
    """
    with tf.init_scope():
        return ResourceVariable(start, trainable=False)
