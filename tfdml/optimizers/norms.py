"""Norms that are bitwise identical on every rank."""

import tensorflow as tf

# Values in a row, whose norm is computed on its own.
ROW = 1024
# TensorFlow sums this many values on one thread.
FEW = 16 * ROW


def squared_norm(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of squares of all values, in float32 or wider.

    TensorFlow splits the sum of a large tensor over the CPU's threads, and its last bits depend on
    their number, so weights would drift apart between different machines. Here each thread sums
    whole rows of a fixed length, then the rows' norms are summed in the same way.

    Args:
        tensor: A tensor or variable of any float dtype.

    Returns:
        A scalar: float64 for float64, else float32.
    """
    numbers = _numbers_of(tensor)
    if numbers.shape[0] is None:
        # Three rounds suffice for more values than any machine holds.
        for _ in range(3):
            numbers = _norms_of_rows(numbers, tf.size(numbers))
    while (numbers.shape[0] or 0) > FEW:
        numbers = _norms_of_rows(numbers, numbers.shape[0])
    return tf.reduce_sum(tf.square(numbers))


def row_norms(part: tf.Tensor) -> tf.Tensor:
    """Returns the norms of a tensor's rows of `ROW` values, in float32 or wider.

    The row norms of consecutive parts of a tensor of more than `FEW` values, which begin at
    multiples of `ROW`, have the `squared_norm` of the tensor.

    Args:
        part: A tensor or variable of any float dtype and known shape.

    Returns:
        A vector: float64 for float64, else float32.
    """
    numbers = _numbers_of(part)
    return _norms_of_rows(numbers, numbers.shape[0])


def _numbers_of(tensor: tf.Tensor) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.size < 4:
        tensor = tf.cast(tensor, tf.float32)
    return tf.reshape(tensor, [-1])


def _norms_of_rows(numbers: tf.Tensor, size: tf.Tensor | int) -> tf.Tensor:
    """Returns the norms of a vector's rows of `ROW` values."""
    padding = -size % ROW
    if tf.is_tensor(padding) or padding:
        numbers = tf.pad(numbers, [[0, padding]])
    return tf.math.reduce_euclidean_norm(tf.reshape(numbers, [-1, ROW]), -1)
