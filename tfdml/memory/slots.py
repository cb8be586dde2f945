"""Bytes of optimizers' variables, counted without allocating them."""

from collections.abc import Sequence

import keras

from tfdml.memory.graph_nodes import nbytes_of
from tfdml.memory.step_graph import OptimizerUpdate


def slot_bytes(updates: Sequence[OptimizerUpdate]) -> int:
    """Returns the bytes of all slots: everything that the optimizers keep, averages included.

    A built optimizer's own variables are counted, otherwise those that its traced copy has built.

    Args:
        updates: The step's updates.
    """
    optimizers = {id(u.optimizer): u.optimizer if u.optimizer.built else u.copy for u in updates}
    return sum(map(variables_bytes, (o.variables for o in optimizers.values())))


def variables_bytes(variables: Sequence[keras.Variable]) -> int:
    """Returns the bytes of some variables, each counted once."""
    return sum(nbytes_of(v) for v in {id(v): v for v in variables}.values())
