"""State for this job's ranks, from what each rank of an earlier job had for itself.

It has names: `slots/O/I` is variable I of optimizer O, and `anchors/F/I` the last common value of
weight I of fragment F.
"""

import math
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.row_deal import RowDeal
from tfdml.strategies.replicas.step_state import components

# Prefix of the names of optimizers' variables.
SLOTS = "slots/"


def slot_copies(optimizers: Sequence[keras.Optimizer]) -> dict[str, list[tf.Variable]]:
    """Returns the copies of each variable of a model's optimizers but the learning rates, by name.

    All ranks have the same learning rate, and a program that is resumed may have changed it.
    """
    return {
        f"{SLOTS}{o}/{i}": components(variable)
        for o, optimizer in enumerate(optimizers)
        for i, variable in enumerate(optimizer.variables)
        if variable is not getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    }


def restore_common(
    model: keras.Model,
    optimizers: Sequence[keras.Optimizer],
    before: Sequence[Mapping[str, np.ndarray]],
) -> None:
    """Restores what all ranks may have of local updates: the means of slots, and common weights.

    Args:
        model: The model.
        optimizers: Its optimizers.
        before: The state of each of the earlier job's ranks, by name.
    """
    for name, copies in slot_copies(optimizers).items():
        values = [state[name] for state in before if name in state]
        # A rank's part of divided slots has another shape: it stays that of rank 0's slots.
        if len(values) == len(before) and values[0].shape == tuple(copies[0].shape):
            mean = np.mean(values, 0) if values[0].dtype.kind == "f" else values[0]
            _assign(copies, mean)
    anchors = {name: v for name, v in before[0].items() if name.startswith("anchors/")}
    fragments = len({name.split("/")[1] for name in anchors})
    for name, value in anchors.items():
        fragment, i = map(int, name.split("/")[1:])
        _assign(components(model.trainable_variables[fragment::fragments][i]), value)


def _assign(copies: Sequence[tf.Variable], value: np.ndarray) -> None:
    for copy in copies:
        copy.assign(value)


def sum_of_ranks(before: Sequence[Sequence[np.ndarray]], shape: Sequence[int]) -> np.ndarray:
    """Returns the sum of the gradients that an earlier job's replicas had accumulated.

    Args:
        before: Of each rank, its replicas' accumulated gradients of a variable.
        shape: The variable's shape.
    """
    first = before[0][0]
    if first.size < math.prod(shape):
        # A table whose rows were dealt to the ranks: each replica had the sum of its rank's rows.
        return RowDeal(tuple(shape), len(before)).join([of_rank[0] for of_rank in before])
    return sum(np.sum(of_rank, 0) for of_rank in before).astype(first.dtype)
