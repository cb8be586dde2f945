"""Bytes of optimizers' variables, counted without allocating them."""

from collections.abc import Sequence

import keras

from tfdml.local_updates import LocalUpdates
from tfdml.memory.step_graph import OptimizerUpdate
from tfdml.strategies.sharded.variable_parts import ownership_of
from tfdml.tensor_memory.graph_nodes import nbytes_of, variables_bytes


def slot_bytes(updates: Sequence[OptimizerUpdate]) -> int:
    """Returns the bytes of all slots: everything that the optimizers keep, averages included.

    A built optimizer's own variables are counted, otherwise those that its traced copy has built.
    So they are where the job divides the optimizer's own among the ranks.

    Args:
        updates: The step's updates.
    """
    counted = {id(u.optimizer): u.optimizer if _is_whole(u.optimizer) else u.copy for u in updates}
    return sum(variables_bytes(optimizer.variables) for optimizer in counted.values())


def table_slot_bytes(
    updates: Sequence[OptimizerUpdate], in_parts: Sequence[OptimizerUpdate]
) -> tuple[int, int]:
    """Returns the bytes of the slots of tables: of whole ones, and of rank 0's parts.

    Args:
        updates: The updates of a step with whole tables.
        in_parts: Those of the same step with a rank's parts of them.
    """
    # The same optimizers have built the same slots in the same order.
    copies = {id(u.copy): (u.copy, p.copy) for u, p in zip(updates, in_parts, strict=True)}
    whole, part = 0, 0
    for of_whole, of_part in copies.values():
        for a, b in zip(of_whole.variables, of_part.variables, strict=True):
            if a.shape != b.shape:
                whole += nbytes_of(a)
                part += nbytes_of(b)
    return whole, part


def common_weight_bytes(
    ranks: int, updates: Sequence[OptimizerUpdate], method: LocalUpdates | None
) -> int:
    """Returns the bytes of the last common weights and of their outer optimizer's slots.

    Args:
        ranks: The number of ranks.
        updates: The step's updates.
        method: Method of local updates, None for synchronous steps, which have neither.
    """
    if method is None or (ranks == 1 and method.is_plain_on_one_process):
        return 0
    outer = method.make_outer_optimizer()
    outer.build([keras.Variable("zeros", shape=[2, 2])])
    slots = sum(tuple(variable.shape) == (2, 2) for variable in outer.variables)
    return (1 + slots) * sum(update.nbytes for update in updates)


def _is_whole(optimizer: keras.Optimizer) -> bool:
    """Returns whether an optimizer is built, and this process has all of its slots."""
    return optimizer.built and all(ownership_of(v) is None for v in optimizer.variables)
