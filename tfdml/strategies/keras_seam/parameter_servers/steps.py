"""Replacements for a worker step's operations on the servers, and for the end of an epoch."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.variables import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfdml.strategies.keras_seam.parameter_servers.data import model_of
from tfdml.strategies.keras_seam.parameter_servers.partitions import update_wholes
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.block_passes import note_change
from tfdml.strategies.parameter_server.chief.remote_function import remote_functions
from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.parameter_server.step.gradient_encoding import sent_to_servers
from tfdml.strategies.parameter_server.step.step_scope import (
    add_on_server,
    add_rows_on_server,
    current_step,
    subtract_rows_on_server,
)


def _tf_sync(original: Callable) -> Callable:
    def tf_sync(self):
        model = model_of(self)
        if model is None:
            return original(self)
        for function in remote_functions(model):
            function.join()

    return tf_sync


def _is_on_server(variable: Variable) -> bool:
    """Returns whether a worker's step is being traced in which the variable is its server's."""
    step = current_step()
    if get_stateless_scope() is not step:
        # In a scope within the step no variable changes, as where `remat` computes a block again.
        return False
    return _is_in_own_loop() if step is None else not step.owns(variable)


def _is_in_own_loop() -> bool:
    """Returns whether the caller is in `strategy.run` of a loop over a `ClusterCoordinator`."""
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return False
    extended = tf.distribute.get_strategy().extended
    return isinstance(extended, ParameterServerExtended) and not in_stateless_scope()


def _assign_add(original: Callable) -> Callable:
    def assign_add(self, value):
        if not _is_on_server(self):
            return original(self, value)
        note_change(self)
        return add_on_server(self, keras.ops.convert_to_tensor(value, self._dtype))

    return assign_add


def _assign_sub(original: Callable) -> Callable:
    def assign_sub(self, value):
        if not _is_on_server(self):
            return original(self, value)
        note_change(self)
        return add_on_server(self, -keras.ops.convert_to_tensor(value, self._dtype))

    return assign_sub


def _add_rows(original: Callable) -> Callable:
    def assign_add(self, variable, value):
        in_a_step = current_step() is not None or _is_in_own_loop()
        if not in_a_step or not isinstance(value, tf.IndexedSlices):
            return original(self, variable, value)
        return add_rows_on_server(variable, value)

    return assign_add


def _subtract_rows(original: Callable) -> Callable:
    def assign_sub(self, variable, value):
        in_a_step = current_step() is not None or _is_in_own_loop()
        if not in_a_step or not isinstance(value, tf.IndexedSlices):
            return original(self, variable, value)
        return subtract_rows_on_server(variable, value)

    return assign_sub


def _distributed_tf_update_step(original: Callable) -> Callable:
    def update(self, distribution, grads_and_vars, learning_rate):
        step = current_step()
        compressor = getattr(distribution, "compressor", None)
        if step is not None and compressor is not None:
            grads_and_vars = sent_to_servers(compressor, list(grads_and_vars), step.stream)
        if hasattr(self, "update_parts"):
            return update_wholes(original, self, distribution, list(grads_and_vars), learning_rate)
        return original(self, distribution, grads_and_vars, learning_rate)

    return update


def _skip_update(original: Callable) -> Callable:
    def handle_non_finite_gradients(self):
        if current_step() is not None:
            # Keras has already traced the other branch, which may double the scale.
            current_step().remember()
        return original(self)

    return handle_non_finite_gradients


REPLACEMENTS: list[Replacement] = [
    (TFEpochIterator, "tf_sync", _tf_sync),
    (Variable, "assign_add", _assign_add),
    (Variable, "assign_sub", _assign_sub),
    (TFOptimizer, "assign_add", _add_rows),
    (TFOptimizer, "assign_sub", _subtract_rows),
    (TFOptimizer, "_distributed_tf_update_step", _distributed_tf_update_step),
    (LossScaleOptimizer, "_stateful_handle_non_finite_grads", _skip_update),
]
