"""Summation of duplicate rows of sparse gradients."""

import tensorflow as tf


def add_up_rows(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Adds up the parts of each row of a sparse gradient.

    A row that a batch looks up twice occurs as two parts. Optimizers that square gradients, norms
    and codecs would treat each part as a gradient of its own, unlike with the dense gradient.

    Args:
        gradient: `tf.IndexedSlices`, rows in any order; a dense gradient is returned as it is.

    Returns:
        The same gradient with each row once, in the order of first occurrence.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(indices))
    values.set_shape([None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
