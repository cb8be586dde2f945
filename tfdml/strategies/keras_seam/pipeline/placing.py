"""Placing of a model's variables, and their slots, on the devices of its stages.

Variables are made before it is known to which stage they belong.
"""

import keras

from tfdml.strategies.keras_seam.pipeline.cutting import get_stages
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.variable_places import move


def place(model: keras.Model, extended: ReplicaExtended) -> bool:
    """Moves a model's variables and their optimizer's slots to the devices of their stages.

    A variable that several stages use belongs to the first. What is there already stays.

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
    moved = False
    for variable in model.variables:
        call = owners.get(id(variable))
        if call is None:
            continue
        devices = [group[assignment[call]] for group in extended.device_groups]
        for own in [variable, *_slots(optimizer, variable)]:
            moved |= move(own, devices)
    return moved


def _slots(optimizer: keras.Optimizer | None, variable: keras.Variable) -> list[keras.Variable]:
    """Returns an optimizer's variables that it has made for one of the model's."""
    prefix = f"{variable.path.replace('/', '_')}_"
    return [
        slot
        for slot in getattr(optimizer, "variables", ())
        if slot.path.rsplit("/", 1)[-1].startswith(prefix) and slot.shape == variable.shape
    ]
