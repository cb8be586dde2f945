"""Replacements for partitioned variables."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.layers.layer import Layer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.parameter_server.partition import (
    clip_by_whole_norm,
    groups,
    note_slot,
    with_parts,
)


def _variables(original: Callable) -> Callable:
    def trainable(self):
        return with_parts(original(self))

    return trainable


def _add_variable_from_reference(original: Callable) -> Callable:
    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        slot = original(self, reference_variable, *args, **kwargs)
        note_slot(slot, reference_variable)
        return slot

    return add_variable_from_reference


def _clip_gradients(original: Callable) -> Callable:
    def clip_gradients(self, grads):
        variables = self._trainable_variables
        parted = any(hasattr(v, "whole") for v in variables)
        if not (self.clipnorm and parted) or len(grads) != len(variables):
            return original(self, grads)
        return clip_by_whole_norm(grads, variables, self.clipnorm)

    return clip_gradients


def update_wholes(
    original: Callable,
    optimizer: BaseOptimizer,
    distribution: tf.distribute.Strategy,
    grads_and_vars: list[tuple[Any, tf.Variable]],
    learning_rate: Any,
) -> None:
    """Updates variables; passes all parts at once to LARS and LAMB, which have `update_parts`.

    Args:
        original: Keras's `_distributed_tf_update_step`.
        optimizer: The optimizer.
        distribution: The strategy.
        grads_and_vars: Pairs of a gradient and a TensorFlow variable.
        learning_rate: The learning rate.
    """
    known = optimizer._trainable_variables
    wholes = {optimizer._var_key(v): getattr(v, "whole", None) for v in known}
    named = [_Named(wholes[optimizer._var_key(v)]) for _, v in grads_and_vars]
    for indices in groups(named):
        pairs = [grads_and_vars[i] for i in indices]
        if len(pairs) == 1:
            original(optimizer, distribution, pairs, learning_rate)
        else:
            optimizer.update_parts([g for g, _ in pairs], [v for _, v in pairs], learning_rate)


class _Named:
    """Object with the attribute that `groups` reads."""

    def __init__(self, whole: Any):
        self.whole = whole


REPLACEMENTS: list[Replacement] = [
    (Layer, "trainable_variables", _variables),
    (Layer, "trainable_weights", _variables),
    (TFOptimizer, "add_variable_from_reference", _add_variable_from_reference),
    (BaseOptimizer, "_clip_gradients", _clip_gradients),
]
