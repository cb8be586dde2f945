"""Files of optimizers whose slots are in parts, on servers or on ranks: they hold whole slots."""

from collections.abc import Callable

import keras
import numpy as np
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdml.strategies.keras_seam.rank_files import has_parts, own_rows_of, save_divided
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.stored_rows import load_parts, save_parts
from tfdml.strategies.parameter_server.partition import whole_slots
from tfdml.strategies.sharded.variable_parts import is_cut, is_dealt, part_of_whole


def _save_own_variables(original: Callable) -> Callable:
    def save_own_variables(self, store):
        if _on_servers(self):
            for i, parts in enumerate(whole_slots(self.variables)):
                save_parts(store, str(i), parts)
        elif has_parts(self):
            save_divided(store, self, self._distribution_strategy)
        else:
            original(self, store)

    return save_own_variables


def _load_own_variables(original: Callable) -> Callable:
    def load_own_variables(self, store):
        slots = whole_slots(self.variables)
        if _on_servers(self) and len(store.keys()) == len(slots):
            for i, parts in enumerate(slots):
                load_parts(store, str(i), parts)
        elif has_parts(self) and len(store.keys()) == len(self.variables):
            for i, variable in enumerate(self.variables):
                if is_dealt(variable):
                    variable.assign(own_rows_of(store, str(i), variable))
                    continue
                value = np.asarray(store[str(i)])
                if is_cut(variable):
                    value = part_of_whole(variable, value)
                if value is not None:
                    variable.assign(value)
        else:
            original(self, store)

    return load_own_variables


def _on_servers(optimizer: keras.Optimizer) -> bool:
    return any(hasattr(v, "slot_of") for v in optimizer.variables)


REPLACEMENTS: list[Replacement] = [
    (BaseOptimizer, "save_own_variables", _save_own_variables),
    (BaseOptimizer, "load_own_variables", _load_own_variables),
]
