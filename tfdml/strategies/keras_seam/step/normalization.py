"""Synchronized `BatchNormalization`: the global batch's moments in a single exchange."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from tfdml.strategies.keras_seam.current import current_extended, current_share
from tfdml.strategies.keras_seam.replacing import Replacement


def _compute_moments_sync(original: Callable) -> Callable:
    """Replaces Keras's three exchanges by one.

    TensorFlow skips one of the three where it knows the number of rows statically, so replicas
    could disagree on the number of exchanges.
    """

    def compute_moments_sync(x, axes, keepdims):
        if current_extended() is None:
            return original(x, axes, keepdims)
        mean, variance = _global_moments(x, tf.ones_like(x), axes)
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return compute_moments_sync


def _moments(original: Callable) -> Callable:
    """Synchronizes moments under a mask, which Keras does not."""

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
    """Returns the mean and the variance over all replicas; all call this, in replica context.

    Args:
        values: A replica's values: any float dtype; 0 where the weight is 0.
        weights: 1 for values that count, else 0: same dtype and shape as `values`.
        axes: Axes to reduce.
        epsilon: Constant added to the count, as Keras does under a mask.

    Returns:
        Mean and variance, each with the shape of `values` but size 1 along `axes`.
    """
    # A padded share computes on a row that is not its own.
    share = current_share()
    present = tf.constant(True) if share is None else share.rows > 0
    # The count does not depend on the values; exchanging its gradient would be useless.
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
