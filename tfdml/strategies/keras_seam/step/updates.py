"""Optimizer update in a replica, from gradients that are already summed."""

from collections.abc import Callable

from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdml.strategies.keras_seam.current import current_extended, current_replicas
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.sharded_optimizers import clip_gradients


def _backend_apply_gradients(original: Callable) -> Callable:
    """Makes the update without Keras's branches; accumulation happens before the exchange."""

    def backend_apply_gradients(self, grads, trainable_variables):
        extended = current_extended()
        if extended is None:
            return original(self, grads, trainable_variables)
        grads = clip_gradients(self, grads, trainable_variables)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
        if self.use_ema and self.ema_overwrite_frequency:
            # Keras branches here; a replica must not, because a branch cannot contain an update.
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


REPLACEMENTS: list[Replacement] = [
    (BaseOptimizer, "_backend_apply_gradients", _backend_apply_gradients),
    (TFOptimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients),
]
