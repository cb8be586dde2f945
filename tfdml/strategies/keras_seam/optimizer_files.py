"""Files of optimizers whose slots are in parts, on servers or on ranks: they hold whole slots."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.legacy.saving import legacy_h5_format
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib

from tfdml.strategies.keras_seam.current import get_extended
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.parameter_server.partition import assign_joined, joined, whole_slots
from tfdml.strategies.replicas.rank_state import optimizers_of
from tfdml.strategies.sharded.variable_parts import (
    ownership_of,
    part_of_whole,
    whole_shapes,
    whole_value,
)


def _save_own_variables(original: Callable) -> Callable:
    def save_own_variables(self, store):
        if _on_servers(self):
            for i, parts in enumerate(whole_slots(self.variables)):
                store[str(i)] = joined(parts)
        elif _on_ranks(self):
            _gather_into(store, self)
        else:
            original(self, store)

    return save_own_variables


def _load_own_variables(original: Callable) -> Callable:
    def load_own_variables(self, store):
        slots = whole_slots(self.variables)
        if _on_servers(self) and len(store.keys()) == len(slots):
            for i, parts in enumerate(slots):
                assign_joined(parts, store[str(i)])
        elif _on_ranks(self) and len(store.keys()) == len(self.variables):
            for i, variable in enumerate(self.variables):
                value = np.asarray(store[str(i)])
                if ownership_of(variable) is not None:
                    value = part_of_whole(variable, value)
                if value is not None:
                    variable.assign(value)
        else:
            original(self, store)

    return load_own_variables


def _on_servers(optimizer: keras.Optimizer) -> bool:
    return any(hasattr(v, "slot_of") for v in optimizer.variables)


def _on_ranks(optimizer: keras.Optimizer) -> bool:
    return any(ownership_of(v) is not None for v in optimizer.variables)


def _gather_into(store: Any, optimizer: keras.Optimizer) -> None:
    """Gathers one slot after the other; rank 0 stores each before the next arrives.

    Args:
        store: Mapping that rank 0 fills with whole slots, by index; None on the other ranks.
        optimizer: The optimizer, with or without a loss scale around it.
    """
    collective = get_extended(optimizer._distribution_strategy).collective
    shapes = whole_shapes(optimizer.variables, collective)
    for i, (variable, shape) in enumerate(zip(optimizer.variables, shapes, strict=True)):
        divided = ownership_of(variable) is not None
        value = whole_value(variable, collective) if divided else variable.numpy()
        if store is not None:
            store[str(i)] = value.reshape(shape)


def _on_all_ranks(original: Callable) -> Callable:
    """Makes all ranks take part where a model is saved whose optimizer has divided slots."""

    def save(model, filepath, *args, **kwargs):
        extended = get_extended(getattr(model, "_distribute_strategy", None))
        divided = [o for o in optimizers_of(model) if _on_ranks(o)]
        if extended is None or not divided:
            return original(model, filepath, *args, **kwargs)
        with extended.collective_call("save"):
            if extended.collective.rank == 0:
                return original(model, filepath, *args, **kwargs)
            for optimizer in divided:
                _gather_into(None, optimizer)
        return None

    return save


def _save_hdf5(original: Callable) -> Callable:
    def save_model_to_hdf5(model, filepath, *args, **kwargs):
        if any(_on_ranks(o) for o in optimizers_of(model)):
            raise ValueError(
                f"`filepath` must end in .keras for a model whose optimizer's slots are divided "
                f"among the ranks, because a .h5 file would have rank 0's part of them alone. "
                f"Received: filepath={filepath!r}."
            )
        return original(model, filepath, *args, **kwargs)

    return save_model_to_hdf5


REPLACEMENTS: list[Replacement] = [
    (BaseOptimizer, "save_own_variables", _save_own_variables),
    (BaseOptimizer, "load_own_variables", _load_own_variables),
    (legacy_h5_format, "save_model_to_hdf5", _save_hdf5),
    (saving_lib, "save_model", _on_all_ranks),
    (saving_lib, "save_weights_only", _on_all_ranks),
]
