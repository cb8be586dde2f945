"""Gradients of a replica, in which each estimate of a loss is weighted by the replica's rows.

The backward pass starts from the weight, so that the weight also passes through exchanges between
replicas. With synchronized `BatchNormalization`, weighting the gradients afterwards is wrong.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.keras_seam.current import current_share
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.block_passes import check_tape
from tfdml.strategies.tensorflow_seam import is_inner
from tfdml.strategies.traced import traced, tracing


def _gradient(original: Callable) -> Callable:
    """Wraps `GradientTape.gradient` to weight gradients on a replica's outermost tape.

    The gradients of an inner tape (a gradient penalty, the step of a meta-learner) are part of the
    loss, and so are gradients with respect to data; they are not weighted.
    """

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target, sources, output_gradients=None, *args, **kwargs):
        share = None
        if _has_variable(sources) and not traced().takes_gradient:
            share = current_share()
        if share is not None and not is_inner(self):
            output_gradients = _weighted(target, output_gradients, share)
        return _taken(original, self, target, sources, output_gradients, *args, **kwargs)

    return gradient


def _jacobian(original: Callable) -> Callable:
    """Wraps `GradientTape.jacobian`, which calls `gradient` for each value; none is weighted."""

    @tf.autograph.experimental.do_not_convert
    def jacobian(self, *args, **kwargs):
        return _taken(original, self, *args, **kwargs)

    return jacobian


def _taken(original: Callable, *args: Any, **kwargs: Any) -> Any:
    check_tape()
    with tracing(takes_gradient=True):
        return original(*args, **kwargs)


def _has_variable(sources: Any) -> bool:
    return any(
        isinstance(source, tf.Variable | tf.distribute.DistributedValues | keras.Variable)
        for source in tf.nest.flatten(sources)
    )


def _weighted(target: Any, output_gradients: Any, share: ShareInfo) -> Any:
    """Returns the output gradients of each target, weighted by the share."""

    def weight(value: Any, given: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        # In values with axes each row counts once, except the row of a padded share.
        part = share.fraction if value.shape.rank == 0 else share.present
        given = tf.ones_like(value) if given is None else tf.cast(given, value.dtype)
        return given * part(value.dtype)

    if output_gradients is None:
        return tf.nest.map_structure(lambda value: weight(value, None), target)
    flat = zip(tf.nest.flatten(target), tf.nest.flatten(output_gradients), strict=True)
    return tf.nest.pack_sequence_as(output_gradients, [weight(*pair) for pair in flat])


REPLACEMENTS: list[Replacement] = [
    (tf.GradientTape, "gradient", _gradient),
    (tf.GradientTape, "jacobian", _jacobian),
]
