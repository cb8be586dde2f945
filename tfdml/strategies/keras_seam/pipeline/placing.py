"""Placing of a model's variables, and their slots, on the devices of its stages.

Variables are made before it is known to which stage they belong.
"""

from collections.abc import Sequence

import keras

from tfdml.strategies.keras_seam.current import get_extended
from tfdml.strategies.keras_seam.pipeline.cutting import get_stages
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.variable_places import move
from tfdml.strategies.sharded.variable_parts import is_cut


def place(model: keras.Model, extended: ReplicaExtended) -> bool:
    """Moves a model's variables and their optimizer's slots to the devices of their stages.

    A variable that several stages use belongs to the first. So do this rank's parts of variables
    whose slots are divided among the ranks. What is there already stays.

    Args:
        model: The model, with built layers.
        extended: Its strategy's extended part.

    Returns:
        Whether anything was elsewhere: steps that were traced before must be traced again.
    """
    graph, assignment = get_stages(model, extended)
    owners = graph.owners()
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    parts = None if optimizer is None else extended.optimizer_parts.get(optimizer)
    moved = False
    for variable in model.variables:
        call = owners.get(id(variable))
        if call is None:
            continue
        devices = [group[assignment[call]] for group in extended.device_groups]
        parts_of_it = [] if parts is None else parts.of([variable])
        for own in [variable, *parts_of_it, *_slots(optimizer, variable)]:
            moved |= move(own, devices)
    return moved


def saved_cut(model: keras.Model) -> list[int] | None:
    """Returns the stage of each call of a model's layers, for JSON; None without a pipeline."""
    extended = get_extended(model.distribute_strategy)
    found = None if extended is None else extended.stages.get(model)
    return None if found is None else list(found[1])


def restore_cut(model: keras.Model, cut: Sequence[int] | None) -> None:
    """Cuts a model as an earlier job did, so that training goes on with the same bits.

    Nothing is changed if the strategy names the layers of each stage, or has another number of
    stages.

    Args:
        model: The model, built, whose next step is not traced yet.
        cut: Result of `saved_cut` in that job.
    """
    extended = get_extended(model.distribute_strategy)
    if cut is None or saved_cut(model) is None or extended.options.pipeline.stages is not None:
        return
    graph, own = extended.stages[model]
    if len(cut) == len(own) and max(cut) == max(own):
        extended.stages[model] = graph, list(cut)
        place(model, extended)


def _slots(optimizer: keras.Optimizer | None, variable: keras.Variable) -> list[keras.Variable]:
    """Returns an optimizer's variables that it has made for one of the model's."""
    prefix = f"{variable.path.replace('/', '_')}_"

    def is_its(slot: keras.Variable) -> bool:
        if is_cut(slot):
            return slot.ownership.whole is variable
        return slot.path.rsplit("/", 1)[-1].startswith(prefix) and slot.shape == variable.shape

    return [slot for slot in getattr(optimizer, "variables", ()) if is_its(slot)]
