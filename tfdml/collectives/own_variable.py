"""Variables that are made where one is, which no strategy mirrors, aggregates or saves."""

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def own_variable(start: tf.Tensor) -> tf.Variable:
    """Returns a variable on the present device alone, whatever strategy's scope it is made in.

    Args:
        start: Its first value.
    """
    with tf.init_scope():
        return ResourceVariable(start, trainable=False)
