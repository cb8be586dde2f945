"""What a replica computes otherwise than one alone: parts of means, and other random numbers."""

import contextvars
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree
from keras.src.losses import loss as keras_loss
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.compile_utils import CompileLoss

from tfdml.strategies.keras_seam import losses
from tfdml.strategies.keras_seam.current import current_share, is_outside_of_replicas


def _reduce_weighted_values(original: Callable) -> Callable:
    def reduce_weighted_values(
        values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
    ):
        share = current_share()
        if share is None:
            return original(values, sample_weight, mask, reduction, dtype)
        return losses.reduce_for_share(
            original, share, values, sample_weight, mask, reduction, dtype
        )

    return reduce_weighted_values


# Whether the tracker that a loss is meant for weighs it by rows. Each replica has a thread of its
# own, and they take turns in the middle of a loss.
_losses_by_rows: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "_losses_by_rows", default=True
)


def _compile_loss(original: Callable) -> Callable:
    def call(self, y_true, y_pred, sample_weight=None):
        if current_share() is None:
            return original(self, y_true, y_pred, sample_weight)
        # Keras's trackers of each output's loss weigh a step by its rows only if they are static.
        counted = tree.flatten(y_pred)[0].shape[0] is not None
        token = _losses_by_rows.set(counted)
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            _losses_by_rows.reset(token)

    return call


def _scale(original: Callable) -> Callable:
    def scale_loss_for_distribution(value):
        share = current_share()
        if share is not None:
            return losses.scale_for_share(value, share)
        return value if is_outside_of_replicas() else original(value)

    return scale_loss_for_distribution


def _unscale(original: Callable) -> Callable:
    def unscale_loss_for_distribution(value):
        share = current_share()
        if share is None:
            return value if is_outside_of_replicas() else original(value)
        return losses.unscale_for_share(value, share, _losses_by_rows.get())

    return unscale_loss_for_distribution


def _next_seed(original: Callable) -> Callable:
    def next_seed(self, ordered=True):
        seed = original(self, ordered)
        if current_share() is None:
            return seed
        # Another stream on each replica; on the first, and on one alone, Keras's own.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return seed + tf.cast(tf.stack([replica * 1_000_003, 0]), seed.dtype)

    return next_seed


REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (keras_loss, "reduce_weighted_values", _reduce_weighted_values),
    (keras_loss, "scale_loss_for_distribution", _scale),
    (keras_loss, "unscale_loss_for_distribution", _unscale),
    (CompileLoss, "call", _compile_loss),
    (SeedGenerator, "next", _next_seed),
]
