"""Arithmetic on gradients that may be sparse, such as those of embedding tables."""

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


def add_up_rows(gradient: Gradient) -> Gradient:
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


def bytes_of_rows(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Returns the values of each row and its index as bytes, which are one message.

    Args:
        gradient: A sparse gradient of n rows.

    Returns:
        uint8, `[n, bytes of the values and the index]`.
    """
    count = tf.shape(gradient.indices)[0]
    parts = []
    for tensor in (gradient.values, gradient.indices):
        # Collectives of TensorFlow send words if the width is known.
        width = tensor.shape[1:].num_elements()
        width = tf.reduce_prod(tf.shape(tensor)[1:]) if width is None else width
        width *= tensor.dtype.size
        parts.append(tf.reshape(tf.bitcast(tensor, tf.uint8), [count, width]))
    return tf.concat(parts, 1)


def rows_of_bytes(rows: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the sparse gradient that `bytes_of_rows` has made bytes of.

    Args:
        rows: The bytes, of any number of rows.
        like: A gradient with the same dtypes, and the same shape but for the number of rows.
    """
    index, value = like.indices.dtype, like.values.dtype
    values, indices = tf.split(rows, [-1, index.size], 1)
    shape = tf.concat([[tf.shape(rows)[0]], tf.shape(like.values)[1:], [value.size]], 0)
    values = tf.bitcast(tf.reshape(values, shape), value)
    values.set_shape([None, *like.values.shape[1:]])
    return tf.IndexedSlices(values, tf.bitcast(indices, index), like.dense_shape)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns a gradient's numbers; of a sparse one those of its rows, shape `[rows, ...]`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    """Returns a gradient with other numbers.

    Args:
        gradient: The gradient, whose rows the result has if it is sparse.
        values: The numbers, in the order of `values_of`.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def times(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    """Returns a gradient multiplied by a scalar of any float dtype."""
    return with_values(gradient, values_of(gradient) * tf.cast(factor, gradient.dtype))
