"""Where partitioned variables, and lookups that stay sparse, enter Keras 3.15.

| Keras's function | what is different for variables on parameter servers |
|---|---|
| `Layer.trainable_variables`, `trainable_weights` | parts in the place of a partitioned variable |
| `Embedding.call` | looks rows up on the server; Keras would fetch the whole table |
| `TFOptimizer.add_variable_from_reference` | a slot knows which part it belongs to |
| `BaseOptimizer.save_own_variables`, `load_own_variables` | files hold whole slots |
| `BaseOptimizer._clip_gradients` | `clipnorm` is of the whole |
| `TFOptimizer._distributed_tf_update_step` | LARS and LAMB are given all parts at once |
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.layers.core.embedding import Embedding
from keras.src.layers.layer import Layer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.parameter_server.partition import (
    assign_joined,
    clip_by_whole_norm,
    groups,
    joined,
    note_slot,
    whole_slots,
    with_parts,
)


def _variables(original: Callable) -> Callable:
    def trainable(self):
        return with_parts(original(self))

    return trainable


def _embedding_call(original: Callable) -> Callable:
    def call(self, inputs):
        table = getattr(self, "_embeddings", None)
        plain = not self.lora_enabled and self.quantization_mode is None
        if not plain or not _is_on_servers(table):
            return original(self, inputs)
        ids = ops.convert_to_tensor(inputs)
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int32)
        ids = tf.where(ids < 0, ids + self.input_dim, ids)
        rows = tf.nn.embedding_lookup(table._value, ids)
        return ops.cast(rows, dtype=self.compute_dtype)

    return call


def _is_on_servers(variable: Any) -> bool:
    value = getattr(variable, "_value", None)
    strategy = getattr(value, "_distribute_strategy", None)
    return isinstance(getattr(strategy, "extended", None), ParameterServerExtended)


def _add_variable_from_reference(original: Callable) -> Callable:
    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        slot = original(self, reference_variable, *args, **kwargs)
        note_slot(slot, reference_variable)
        return slot

    return add_variable_from_reference


def _has_parts(optimizer: BaseOptimizer) -> bool:
    return any(hasattr(v, "slot_of") for v in optimizer.variables)


def _save_own_variables(original: Callable) -> Callable:
    def save_own_variables(self, store):
        if not _has_parts(self):
            return original(self, store)
        for i, parts in enumerate(whole_slots(self.variables)):
            store[str(i)] = joined(parts)

    return save_own_variables


def _load_own_variables(original: Callable) -> Callable:
    def load_own_variables(self, store):
        slots = whole_slots(self.variables)
        if not _has_parts(self) or len(store.keys()) != len(slots):
            return original(self, store)
        for i, parts in enumerate(slots):
            assign_joined(parts, store[str(i)])

    return load_own_variables


def _clip_gradients(original: Callable) -> Callable:
    def clip_gradients(self, grads):
        variables = self._trainable_variables
        parted = any(hasattr(v, "whole") for v in variables)
        if not (self.clipnorm and parted) or len(grads) != len(variables):
            return original(self, grads)
        return clip_by_whole_norm(grads, variables, self.clipnorm)

    return clip_gradients


def _distributed_tf_update_step(original: Callable) -> Callable:
    def update(self, distribution, grads_and_vars, learning_rate):
        grads_and_vars = list(grads_and_vars)
        if not hasattr(self, "update_parts"):
            return original(self, distribution, grads_and_vars, learning_rate)
        wholes = {self._var_key(v): getattr(v, "whole", None) for v in self._trainable_variables}
        named = [_Named(wholes[self._var_key(v)]) for _, v in grads_and_vars]
        for places in groups(named):
            pairs = [grads_and_vars[i] for i in places]
            if len(pairs) == 1:
                original(self, distribution, pairs, learning_rate)
            else:
                self.update_parts([g for g, _ in pairs], [v for _, v in pairs], learning_rate)

    return update


class _Named:
    """What `groups` looks at."""

    def __init__(self, whole: Any):
        self.whole = whole


def install() -> None:
    """Puts this part of the seam in place, once."""
    for name in ("trainable_variables", "trainable_weights"):
        original = getattr(Layer, name)
        if not hasattr(original.fget, "_tfdml_replaces"):
            getter = _variables(original.fget)
            getter._tfdml_replaces = original.fget
            setattr(Layer, name, property(getter, doc=original.__doc__))


REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (Embedding, "call", _embedding_call),
    (TFOptimizer, "add_variable_from_reference", _add_variable_from_reference),
    (BaseOptimizer, "save_own_variables", _save_own_variables),
    (BaseOptimizer, "load_own_variables", _load_own_variables),
    (BaseOptimizer, "_clip_gradients", _clip_gradients),
    (TFOptimizer, "_distributed_tf_update_step", _distributed_tf_update_step),
]
