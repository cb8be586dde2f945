"""Optimizers: gradients are summed over all replicas before anything else is done with them."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfdml.strategies.keras_seam.compiled import hold_back
from tfdml.strategies.keras_seam.current import current_extended, current_replicas, extended_of


def _apply(original: Callable) -> Callable:
    """`apply` of the outermost optimizer: gradients are summed before anything else is done."""

    def apply(self, grads, trainable_variables=None):
        extended = current_replicas()
        inner = getattr(self, "inner_optimizer", self)
        if extended is None or getattr(self, "_tfdml_gets_sums", False):
            return original(self, grads, trainable_variables)
        if hold_back(self, grads, trainable_variables):
            return None
        grads, variables = list(grads), trainable_variables
        accumulator = extended.accumulator
        if inner.gradient_accumulation_steps:
            variables = list(inner._trainable_variables if variables is None else variables)
            if accumulator is None or accumulator.optimizer is not inner:
                raise ValueError(
                    "`gradient_accumulation_steps` must be of the optimizer that `compile` was "
                    f"given, in a call of `fit` or `train_on_batch`. Received: {inner.name}, "
                    "applied elsewhere. Sum the gradients of several steps yourself there."
                )
            if not accumulator.updates:
                return accumulator.keep(grads, variables)
            grads = accumulator.take(grads, variables)
        summed = inner._trainable_variables if variables is None else variables
        grads = [_of_known_shape(g, v) for g, v in zip(grads, summed, strict=True)]
        names = [v.path for v in summed]
        rates = functools.partial(_rates, self, inner)
        if extended.compressor is not None:
            extended.compressor.check_optimizer(inner)
        grads = extended.sum_gradients(f"gradients/{self.name}", grads, names, rates)
        if inner is self:
            return original(self, grads, variables)
        before = tf.convert_to_tensor(inner._iterations)
        inner._tfdml_gets_sums = True
        try:
            original(self, grads, variables)
        finally:
            inner._tfdml_gets_sums = False
        if inner.gradient_accumulation_steps:
            accumulator.restart(before)

    return apply


def _of_known_shape(gradient: Any, variable: keras.Variable) -> Any:
    """Returns a sparse gradient with its shape, which in a graph is not known of an embedding's."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(tuple(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def _rates(outer: keras.Optimizer, inner: keras.Optimizer) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Returns the loss scale, None without one, and the learning rate."""
    scale = None if inner is outer else tf.convert_to_tensor(outer.dynamic_scale)
    return scale, tf.convert_to_tensor(inner.learning_rate)


def _sgd_update_step(original: Callable) -> Callable:
    def update_step(self, gradient, variable, learning_rate):
        extended = extended_of(tf.distribute.get_strategy())
        aggregator = extended.aggregator if extended is not None else None
        if aggregator is None or not extended.compressor.replaces_momentum:
            return original(self, gradient, variable, learning_rate)
        # Momentum is in what has been exchanged.
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, tf.cast(gradient, variable.dtype) * rate)

    return update_step


def _backend_apply_gradients(original: Callable) -> Callable:
    """The update itself, without Keras's branches; accumulation is done before the exchange."""

    def backend_apply_gradients(self, grads, trainable_variables):
        extended = current_extended()
        if extended is None:
            return original(self, grads, trainable_variables)
        grads = self._clip_gradients(grads)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
        if self.use_ema and self.ema_overwrite_frequency:
            # Keras branches here, which a replica may not: an update must follow.
            due = (self.iterations + 1) % self.ema_overwrite_frequency == 0
            averages = [v.value for v in self._model_variables_moving_average]
            variables = [v.value for v in self._trainable_variables]
            extended.overwrite_where(due, variables, averages)

    return backend_apply_gradients


def _all_reduce_sum_gradients(original: Callable) -> Callable:
    def all_reduce_sum_gradients(self, grads_and_vars):
        if current_replicas() is not None:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return all_reduce_sum_gradients


REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (BaseOptimizer, "apply", _apply),
    (BaseOptimizer, "_backend_apply_gradients", _backend_apply_gradients),
    (LossScaleOptimizer, "apply", _apply),
    (keras.optimizers.SGD, "update_step", _sgd_update_step),
    (TFOptimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients),
]
