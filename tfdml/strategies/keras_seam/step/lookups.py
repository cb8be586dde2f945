"""Lookups in embedding tables that read the rows of the batch, and no others."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.layers.core.embedding import Embedding

from tfdml.optimizers.touched_rows import read_rows
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.replicas.extended import ReplicaExtended


def _embedding_call(original: Callable) -> Callable:
    """Wraps `Embedding.call`, which reads the whole table.

    A variable whose rows an optimizer updates copies all of its numbers when it is read as a whole;
    from a server it would be sent.
    """

    def call(self, inputs):
        lookup = _lookup_of(self, inputs)
        if lookup is None:
            return original(self, inputs)
        ids = keras.ops.convert_to_tensor(inputs)
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int32)
        # As in Keras, negative ids count from the end.
        ids = tf.where(ids < 0, ids + self.input_dim, ids)
        return keras.ops.cast(lookup(ids), dtype=self.compute_dtype)

    return call


def _lookup_of(layer: keras.layers.Embedding, inputs: Any) -> Callable | None:
    """Returns the function of ids that looks rows up; None where Keras must do it."""
    table = getattr(layer, "_embeddings", None)
    if table is None or layer.lora_enabled or layer.quantization_mode is not None:
        return None
    value = table._value
    extended = getattr(getattr(value, "_distribute_strategy", None), "extended", None)
    if isinstance(extended, ParameterServerExtended):
        return functools.partial(tf.nn.embedding_lookup, value)
    # In a stateless scope the variable's value is another tensor.
    is_own = isinstance(extended, ReplicaExtended) and table.value is value
    if not is_own or isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
        return None
    return functools.partial(read_rows, value)


REPLACEMENTS: list[Replacement] = [
    (Embedding, "call", _embedding_call),
]
