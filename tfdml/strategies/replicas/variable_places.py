"""Devices of mirrored variables, which a pipeline moves to those of its stages.

This module depends on internals of `tf.distribute` (TensorFlow 2.20, 2.21).
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def devices_of(variable: keras.Variable) -> tuple[str, ...]:
    """Returns the device of a variable in each of this process's replicas."""
    return variable.value._devices


def move(variable: keras.Variable, devices: Sequence[str]) -> bool:
    """Moves a variable, if it is mirrored, to another device of each of this process's replicas.

    Graphs that were traced before still use the old place.

    Args:
        variable: The variable.
        devices: The devices, one for each replica.

    Returns:
        Whether it was elsewhere before.
    """
    mirrored = variable.value
    if not isinstance(mirrored, DistributedVariable) or mirrored._devices == tuple(devices):
        return False
    moved = []
    for part, device in zip(mirrored.values, devices, strict=True):
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
    mirrored._values = tuple(moved)
    return True
