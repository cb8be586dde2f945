"""Replacements for what a replica computes differently: losses, means and random numbers."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as keras_loss
from keras.src.random.seed_generator import SeedGenerator

from tfdml.strategies.keras_seam.current import current_share, is_outside_of_replicas
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step import losses


def _reduce_weighted_values(original: Callable) -> Callable:
    def reduce_weighted_values(
        values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
    ):
        share = current_share()
        if share is None:
            return original(values, sample_weight, mask, reduction, dtype)
        return losses.reduce_to_estimate(
            original, share, values, sample_weight, mask, reduction, dtype
        )

    return reduce_weighted_values


def _scale(original: Callable) -> Callable:
    """Replaces `scale_loss_for_distribution` and its inverse; replicas' losses need no scaling."""

    def scale(value):
        if current_share() is not None or is_outside_of_replicas():
            return value
        return original(value)

    return scale


def _aggregate_additional_loss(original: Callable) -> Callable:
    def aggregate_additional_loss(self, loss):
        total, share = original(self, loss), current_share()
        if share is None or len(loss.shape) == 0:
            return total
        return losses.estimate_from_sum(total, share)

    return aggregate_additional_loss


def _average_loss(original: Callable) -> Callable:
    """Replaces TensorFlow's mean over the global batch by a replica's estimate of it."""

    def compute_average_loss(per_example_loss, sample_weight=None, global_batch_size=None):
        share = current_share()
        if share is None:
            return original(per_example_loss, sample_weight, global_batch_size)
        size = share.global_rows if global_batch_size is None else global_batch_size
        return losses.estimate_from_sum(original(per_example_loss, sample_weight, size), share)

    return compute_average_loss


def _regularization_loss(original: Callable) -> Callable:
    """Replaces TensorFlow's scaling of a loss that does not depend on rows by the plain sum."""

    def scale_regularization_loss(regularization_loss):
        if current_share() is None:
            return original(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    return scale_regularization_loss


def _mean_update_state(original: Callable) -> Callable:
    """Weights a replica's scalar by its fraction of the rows, so that all replicas count as one."""

    def update_state(self, values, sample_weight=None):
        share = current_share()
        if share is not None and sample_weight is None and ops.ndim(values) == 0:
            sample_weight = share.fraction(self.dtype)
        return original(self, values, sample_weight)

    return update_state


def next_seed(keras_next: Callable, generator: SeedGenerator, ordered: bool) -> tf.Tensor:
    """Returns a seed from a different stream on each replica; Keras's own on the first or only."""
    seed = keras_next(generator, ordered)
    if current_share() is None:
        return seed
    replica = tf.distribute.get_replica_context()
    # In a local step, too, each rank has its own stream.
    number = replica.strategy.extended.number_of_replica(replica._local_replica_id)
    return seed + tf.cast(tf.stack([number * 1_000_003, 0]), seed.dtype)


REPLACEMENTS: list[Replacement] = [
    (keras_loss, "reduce_weighted_values", _reduce_weighted_values),
    (keras_loss, "scale_loss_for_distribution", _scale),
    (keras_loss, "unscale_loss_for_distribution", _scale),
    (TensorFlowTrainer, "_aggregate_additional_loss", _aggregate_additional_loss),
    (tf.nn, "compute_average_loss", _average_loss),
    (tf.nn, "scale_regularization_loss", _regularization_loss),
    (keras.metrics.Mean, "update_state", _mean_update_state),
]
