"""Synchronized `BatchNormalization`: the moments of the global batch, by one exchange."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from tfdml.strategies.keras_seam.current import current_extended, current_share
from tfdml.strategies.keras_seam.replacing import Replacement


def _compute_moments_sync(original: Callable) -> Callable:
    """Keras's three exchanges, of which TensorFlow leaves one out where it knows the rows ahead."""

    def compute_moments_sync(x, axes, keepdims):
        if current_extended() is None:
            return original(x, axes, keepdims)
        mean, variance = _global_moments(x, tf.ones_like(x), axes)
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return compute_moments_sync


def _moments(original: Callable) -> Callable:
    """Keras does not synchronize moments under a mask."""

    def moments(self, inputs, mask):
        if mask is None or not self.synchronized or current_extended() is None:
            return original(self, inputs, mask)
        weights = tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., tf.newaxis], tf.shape(inputs))
        inputs = tf.where(weights > 0, inputs, tf.zeros_like(inputs))
        epsilon = keras.config.epsilon()
        mean, variance = _global_moments(inputs, weights, self._reduction_axes, epsilon)
        return tf.squeeze(mean), tf.squeeze(variance)

    return moments


def _global_moments(
    values: tf.Tensor, weights: tf.Tensor, axes: Sequence[int], epsilon: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the variance over all replicas; called in replica context, by all.

    Args:
        values: A replica's: any float dtype; 0 where the weight is.
        weights: What counts, 1 or 0: of the same dtype and shape.
        axes: What is reduced.
        epsilon: Is added to the count, as Keras does under a mask.

    Returns:
        Both of the shape of `values`, with 1 for each of `axes`.
    """
    # A padded share computes on a row that is not its own.
    share = current_share()
    present = tf.constant(True) if share is None else share.rows > 0
    # The count is no function of the values; its gradient would be exchanged for nothing.
    sums = (
        tf.reduce_sum(values, axes, keepdims=True),
        tf.reduce_sum(tf.square(values), axes, keepdims=True),
        tf.stop_gradient(tf.reduce_sum(weights, axes, keepdims=True)),
    )
    own = tf.stack([tf.where(present, s, tf.zeros_like(s)) for s in sums])
    replica = tf.distribute.get_replica_context()
    total, squares, count = tf.unstack(replica.all_reduce(tf.distribute.ReduceOp.SUM, own))
    mean = tf.math.divide_no_nan(total, count + epsilon)
    # The sum of (value - mean)^2 over the values that count.
    distances = squares - 2.0 * mean * total + tf.square(mean) * count
    variance = tf.math.divide_no_nan(tf.maximum(distances, 0.0), count + epsilon)
    return mean, variance


REPLACEMENTS: list[Replacement] = [
    (nn, "_compute_moments_sync", _compute_moments_sync),
    (BatchNormalization, "_moments", _moments),
]
