"""Placing of a model's variables, and their slots, on the devices of its stages.

Variables are made before it is known to which stage they belong.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdml.strategies.keras_seam.pipeline.cutting import get_stages
from tfdml.strategies.replicas.extended import ReplicaExtended


def place(model: keras.Model, extended: ReplicaExtended) -> None:
    """Moves a model's variables and their optimizer's slots to the devices of their stages.

    A variable that several stages use belongs to the first. What is there already stays.

    Args:
        model: The model, with built layers.
        extended: Its strategy's extended part.
    """
    graph, assignment = get_stages(model, extended)
    owners = graph.owners()
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for variable in model.variables:
        call = owners.get(id(variable))
        if call is None:
            continue
        devices = [group[assignment[call]] for group in extended.device_groups]
        for own in [variable, *_slots(optimizer, variable)]:
            if isinstance(own.value, DistributedVariable):
                _move(own.value, devices)


def _slots(optimizer: keras.Optimizer | None, variable: keras.Variable) -> list[keras.Variable]:
    """Returns an optimizer's variables that it has made for one of the model's."""
    prefix = f"{variable.path.replace('/', '_')}_"
    return [
        slot
        for slot in getattr(optimizer, "variables", ())
        if slot.path.rsplit("/", 1)[-1].startswith(prefix) and slot.shape == variable.shape
    ]


def _move(variable: DistributedVariable, devices: Sequence[str]) -> None:
    """Moves each replica's part of a variable to a device."""
    if list(variable._devices) == list(devices):
        return
    moved = []
    for part, device in zip(variable.values, devices, strict=True):
        with tf.init_scope(), tf.device(device):
            own = ResourceVariable(
                part.read_value(),
                trainable=part.trainable,
                dtype=part.dtype,
                name=part.name.split(":")[0],
                synchronization=part.synchronization,
                aggregation=part.aggregation,
            )
        # Optimizers know variables by it.
        own._unique_id = part._unique_id
        own.handle._distributed_container = part.handle._distributed_container
        moved.append(own)
    variable._values = tuple(moved)
