"""Embedding tables that are dealt to the ranks: how they are made, read and saved."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.layers.core.embedding import Embedding

from tfdml.collectives.row_deal import RowDeal
from tfdml.strategies.keras_seam.current import current_extended, get_extended
from tfdml.strategies.keras_seam.initial_rows import OwnRows, with_seed
from tfdml.strategies.keras_seam.rank_files import own_rows_of, save_divided
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.stored_rows import load_parts, save_parts
from tfdml.strategies.parameter_server.partition import is_partitioned, parts_of
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.sharded.large_tables import is_large, needs_of_whole_table
from tfdml.strategies.sharded.late_exchanges import together
from tfdml.strategies.sharded.variable_parts import Ownership, is_dealt


def _build(original: Callable) -> Callable:
    """Makes this rank's rows of a large table, with the values that they have in the whole."""

    def build(self, input_shape=None):
        extended = get_extended(tf.distribute.get_strategy())
        if self.built or extended is None or not _deals(extended, self):
            return original(self, input_shape)
        _check(self, extended.collective.rank)
        deal = RowDeal((self.input_dim, self.output_dim), extended.collective.size)
        rank = extended.collective.rank
        whole = _common(self.embeddings_initializer, extended)
        before = self.input_dim, self.embeddings_initializer
        self.input_dim = deal.rows(rank)
        self.embeddings_initializer = OwnRows(whole, deal, rank)
        try:
            with extended.making_own_variables():
                original(self, input_shape)
        finally:
            self.input_dim, self.embeddings_initializer = before
        self._embeddings.ownership = Ownership(None, deal, rank)
        self._embeddings.whole_shape = deal.shape
        self._embeddings.times_loaded = 0
        extended.around_step = functools.partial(together, extended)
        return None

    return build


def _deals(extended: ReplicaExtended, layer: keras.layers.Embedding) -> bool:
    """Returns whether a layer's table is dealt to the ranks."""
    sharding = extended.options.sharding
    if sharding is None or not sharding.embeddings or extended.collective.size == 1:
        return False
    return is_large(layer, sharding.min_embedding_bytes)


def _check(layer: keras.layers.Embedding, rank: int) -> None:
    """Checks that a table needs no more than single rows.

    Raises:
        ValueError: If it does.
    """
    for name, value in needs_of_whole_table(layer).items():
        raise ValueError(
            f"`{name}` must be None for a table that is divided among the ranks, because it "
            f"works on the whole table in every step. Received on rank {rank}: "
            f"{name}={value!r} of the layer {layer.name!r}. Leave it out (`weight_decay` of "
            f"RowWiseAdagrad and LazyAdam works on looked-up rows), or choose a larger "
            f"`min_embedding_bytes`."
        )


def _common(initializer: Callable, extended: ReplicaExtended) -> Callable:
    """Returns rank 0's initializer; all ranks call this."""
    seed = getattr(initializer, "seed", None)
    with tf.init_scope(), extended.making_variable("a table's seed"):
        own = tf.constant([seed if isinstance(seed, int) else 0], tf.int64)
        common = extended.collective.broadcast(own, "table_seed")
        return with_seed(initializer, int(common.numpy()[0]))


def _embeddings(original: Callable) -> Callable:
    """Refuses to give a step this rank's rows for the whole table."""

    def embeddings(self):
        table = getattr(self, "_embeddings", None)
        if is_dealt(table) and (current_extended() is not None or in_symbolic_scope()):
            raise ValueError(
                f"`embeddings` must not be read in a step if the table is divided among the "
                f"ranks: this rank has some of its rows. Received: a read of those of the layer "
                f"{self.name!r}, as by an output layer with the same weights. Call the layer with "
                f"ids, or choose a larger `min_embedding_bytes`."
            )
        return original(self)

    return embeddings


def _refused(name: str) -> Callable:
    """Returns the wrapper of a method that a divided table does not have."""

    def wrap(original: Callable) -> Callable:
        def refusing(self, *args: Any, **kwargs: Any):
            if is_dealt(getattr(self, "_embeddings", None)):
                raise ValueError(
                    f"`{name}` must not be called for a table that is divided among the ranks. "
                    f"Received: a call for the layer {self.name!r}. Save the model, and call it "
                    f"after loading the model without `Sharding(embeddings=True)`."
                )
            return original(self, *args, **kwargs)

        return refusing

    return wrap


def _save_own_variables(original: Callable) -> Callable:
    def save_own_variables(self, store):
        table = getattr(self, "_embeddings", None)
        if is_dealt(table):
            save_divided(store, table, table._value._distribute_strategy)
        elif _is_plain(self) and is_partitioned(table):
            save_parts(store, "0", parts_of(table))
        else:
            original(self, store)

    return save_own_variables


def _load_own_variables(original: Callable) -> Callable:
    def load_own_variables(self, store):
        table = getattr(self, "_embeddings", None)
        if is_dealt(table):
            self._check_load_own_variables(store)
            table.assign(own_rows_of(store, "0", table))
            table.times_loaded += 1
        elif _is_plain(self) and is_partitioned(table):
            self._check_load_own_variables(store)
            load_parts(store, "0", parts_of(table))
        else:
            original(self, store)

    return load_own_variables


def _is_plain(layer: keras.layers.Embedding) -> bool:
    """Returns whether a layer's file has its table and nothing else."""
    return not layer.lora_enabled and layer.quantization_mode is None


REPLACEMENTS: list[Replacement] = [
    (Embedding, "build", _build),
    (Embedding, "embeddings", _embeddings),
    (Embedding, "enable_lora", _refused("enable_lora")),
    (Embedding, "quantize", _refused("quantize")),
    (Embedding, "save_own_variables", _save_own_variables),
    (Embedding, "load_own_variables", _load_own_variables),
]
