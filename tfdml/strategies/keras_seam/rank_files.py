"""Files of models of which each rank has a part: rank 0 writes, and asks the others for theirs."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from tfdml.collectives.collective import Collective
from tfdml.strategies.keras_seam.current import get_extended
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.stored_rows import store_rows, stored_rows
from tfdml.strategies.replicas.rank_state import optimizers_of
from tfdml.strategies.sharded.variable_parts import (
    is_dealt,
    ownership_of,
    whole_shapes,
    whole_value,
)
from tfdml.strategies.sharded.whole_tables import blocks_of

# Something of which each rank has a part: a table, or an optimizer.
Divided = keras.Variable | keras.Optimizer
_END = -1


class PartRequests:
    """Rank 0's requests for the other ranks' parts, in the order in which Keras saves.

    Args:
        collective: Collective between the ranks.
        divided: Tables and optimizers in parts, the same list on all ranks.
    """

    def __init__(self, collective: Collective, divided: Sequence[Divided]):
        self._collective = collective
        self._divided = list(divided)

    def request(self, wanted: Divided) -> None:
        """Tells the other ranks what is gathered next; called by rank 0."""
        (index,) = (i for i, each in enumerate(self._divided) if each is wanted)
        self._broadcast(index)

    def end(self) -> None:
        """Tells the other ranks that all is saved; called by rank 0."""
        self._broadcast(_END)

    def serve(self) -> None:
        """Sends this rank's parts until rank 0 has all; called by the other ranks."""
        while (index := self._broadcast(_END)) != _END:
            gather_into(None, self._divided[index], self._collective)

    def _broadcast(self, index: int) -> int:
        own = tf.constant([index], tf.int32)
        return int(self._collective.broadcast(own, "save/next").numpy()[0])


def save_divided(store: Any, divided: Divided, strategy: tf.distribute.Strategy) -> None:
    """Stores what is divided as a whole; all ranks call this, or rank 0 alone in a save.

    Args:
        store: Mapping that is filled with whole values, by index.
        divided: A table, or an optimizer with slots in parts.
        strategy: Its strategy.
    """
    extended = get_extended(strategy)
    if extended.part_requests is not None:
        extended.part_requests.request(divided)
    gather_into(store, divided, extended.collective)


def gather_into(store: Any, divided: Divided, collective: Collective) -> None:
    """Gathers one variable after the other; rank 0 stores each before the next arrives.

    Args:
        store: Mapping that is filled with whole values, by index; None on the other ranks.
        divided: A table, or an optimizer with slots in parts.
        collective: Collective between the ranks.
    """
    if isinstance(divided, keras.Variable):
        _gather_table(store, "0", divided, collective)
        return
    shapes = whole_shapes(divided.variables, collective)
    for i, (variable, shape) in enumerate(zip(divided.variables, shapes, strict=True)):
        if is_dealt(variable):
            _gather_table(store, str(i), variable, collective)
            continue
        cut = ownership_of(variable) is not None
        value = whole_value(variable, collective) if cut else variable.numpy()
        if store is not None:
            store[str(i)] = value.reshape(shape)


def _gather_table(store: Any, key: str, variable: keras.Variable, collective: Collective) -> None:
    """Gathers a table by blocks of rows; rank 0 stores them."""
    blocks = blocks_of(variable, collective)
    if store is None:
        for _ in blocks:
            pass
    else:
        store_rows(store, key, variable.ownership.cut.shape, variable.dtype, blocks)


def own_rows_of(store: Any, key: str, variable: keras.Variable) -> np.ndarray:
    """Returns this rank's rows of a table in a file, reading no others if it is an HDF5 file.

    Args:
        store: Mapping with whole values, by index.
        key: The table's index.
        variable: A table that is dealt to the ranks, or its slot.
    """
    ownership = variable.ownership
    stored = stored_rows(store, key, ownership.cut.shape, variable.path)
    return np.asarray(ownership.cut.part_of(stored, ownership.rank))


def _divided_of(model: keras.Model) -> list[Divided]:
    tables = [variable for variable in model.variables if is_dealt(variable)]
    return [*tables, *(o for o in optimizers_of(model) if has_parts(o))]


def has_parts(optimizer: keras.Optimizer) -> bool:
    """Returns whether each rank has its own part of an optimizer's variables."""
    return any(ownership_of(variable) is not None for variable in optimizer.variables)


def _save(original: Callable) -> Callable:
    """Makes all ranks take part where a model is saved of which each has a part."""

    def save(model, filepath, *args, **kwargs):
        extended = get_extended(getattr(model, "_distribute_strategy", None))
        divided = [] if extended is None else _divided_of(model)
        if not divided:
            return original(model, filepath, *args, **kwargs)
        requests = PartRequests(extended.collective, divided)
        with extended.collective_call("save"):
            if extended.collective.rank > 0:
                return requests.serve()
            extended.part_requests = requests
            try:
                return original(model, filepath, *args, **kwargs)
            finally:
                extended.part_requests = None
                requests.end()

    return save


def _save_hdf5(original: Callable) -> Callable:
    def save_model_to_hdf5(model, filepath, *args, **kwargs):
        if _divided_of(model):
            raise ValueError(
                f"`filepath` must end in .keras for a model whose optimizer's slots, or tables, "
                f"are divided among the ranks, because a .h5 file would have rank 0's part of them "
                f"alone. Received: filepath={filepath!r}."
            )
        return original(model, filepath, *args, **kwargs)

    return save_model_to_hdf5


REPLACEMENTS: list[Replacement] = [
    (legacy_h5_format, "save_model_to_hdf5", _save_hdf5),
    (saving_lib, "save_model", _save),
    (saving_lib, "save_weights_only", _save),
]
