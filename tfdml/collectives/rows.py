"""Rows of sparse gradients: each once, as in the dense gradient."""

import tensorflow as tf


def add_up_rows(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Adds up the parts of each row of a sparse gradient.

    A row that a batch looks up twice comes as two parts. Optimizers that square gradients, norms
    and codecs would take each part for a gradient of its own: other numbers than the dense
    gradient's.

    Args:
        gradient: `tf.IndexedSlices`, its rows in any order; a dense gradient is returned as it is.

    Returns:
        The same gradient, with each row once, in the order of their first parts.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    values.set_shape([None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
