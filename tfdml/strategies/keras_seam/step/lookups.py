"""Lookups in embedding tables that read the rows of the batch, and no others."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.layers.core.embedding import Embedding

from tfdml.optimizers.touched_rows import read_rows
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.sharded.table_lookup import look_up
from tfdml.strategies.sharded.variable_parts import is_dealt


def _embedding_call(original: Callable) -> Callable:
    """Wraps `Embedding.call`, which reads the whole table.

    A variable whose rows an optimizer updates copies all of its numbers when it is read as a whole;
    from a server it would be sent.
    """

    def call(self, inputs):
        lookup = _lookup_of(self, inputs)
        if lookup is None:
            return original(self, inputs)
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(functools.partial(call, self), inputs)
        dense = tf.sparse.to_dense(inputs) if isinstance(inputs, tf.SparseTensor) else inputs
        ids = keras.ops.convert_to_tensor(dense)
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
    if is_dealt(table):
        return _zeros(layer) if in_symbolic_scope() else _lookup_over_ranks(layer, extended)
    if isinstance(extended, ParameterServerExtended):
        # Which server has a row is computed from its id, right or wrong.
        return lambda ids: tf.nn.embedding_lookup(value, _checked(ids, layer))
    # In a stateless scope the variable's value is another tensor.
    is_own = isinstance(extended, ReplicaExtended) and table.value is value
    if not is_own or isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
        return None
    return functools.partial(read_rows, value)


def _zeros(layer: keras.layers.Embedding) -> Callable:
    """Returns a function that gives the shape of rows, while Keras finds out a model's shapes."""
    return lambda ids: tf.zeros(tf.concat([tf.shape(ids), [layer.output_dim]], 0))


def _lookup_over_ranks(layer: keras.layers.Embedding, extended: ReplicaExtended) -> Callable:
    """Returns the lookup in a table of which each rank has its own rows.

    Raises:
        ValueError: In a block of `remat`, whose second pass would exchange rows again.
    """
    table = layer._embeddings
    if in_stateless_scope():
        raise ValueError(
            f"A layer whose table is divided among the ranks must not be called in a block of "
            f"`tfdml.remat`, in a `keras.RematScope` or by `stateless_call`. Received: a call of "
            f"{layer.name!r} there. Call it before the block."
        )

    def lookup(ids: tf.Tensor) -> tf.Tensor:
        ids = _checked(ids, layer)
        with extended.collective_call(f"a lookup in {table.path}", in_step=True):
            return look_up(
                extended, table.ownership.cut, functools.partial(read_rows, table._value), ids
            )

    return lookup


def _checked(ids: tf.Tensor, layer: keras.layers.Embedding) -> tf.Tensor:
    """Returns ids of the rows of a table; ends the step with the first one out of range."""
    wrong = tf.logical_or(ids < 0, ids >= layer.input_dim)
    place = tf.where(wrong)[:1]
    words = [
        f"Ids must be from 0 to {layer.input_dim - 1}, the rows of the layer {layer.name!r}. "
        f"Received the id:",
        tf.gather_nd(ids, place),
        "at this index of the process's part of the batch:",
        place,
    ]
    check = tf.debugging.Assert(tf.logical_not(tf.reduce_any(wrong)), words)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(ids)


REPLACEMENTS: list[Replacement] = [
    (Embedding, "call", _embedding_call),
]
