"""Bytes of an optimizer's variables for some of a model's, counted without allocating them."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.pipeline.apart import apart
from tfdml.tensor_memory.graph_nodes import variables_bytes
from tfdml.tensor_memory.unbuilt_copy import unbuilt_copy


def slot_bytes(
    optimizer: keras.Optimizer | None, groups: Sequence[Sequence[keras.Variable]]
) -> list[int]:
    """Returns the bytes of the slots for each group of variables.

    Averages are slots as well; single numbers, such as the count of steps, are left out.

    Args:
        optimizer: The optimizer, which stays as it is; None for no slots.
        groups: Groups of trainable variables.

    Raises:
        ValueError: If the optimizer cannot be copied.
    """
    if optimizer is None:
        return [0] * len(groups)
    return apart(lambda: [_count(optimizer, group) for group in groups])


def _count(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> int:
    if not variables:
        return 0
    copy = unbuilt_copy(optimizer)
    # Variables of a graph that never runs have no memory.
    with tf.Graph().as_default():
        copy.build([_stand_in(variable) for variable in variables])
        return variables_bytes(slot for slot in copy.variables if len(slot.shape))


def _stand_in(variable: keras.Variable) -> keras.Variable:
    found = keras.Variable("zeros", variable.shape, variable.dtype, name=variable.name)
    # Some optimizers choose by it.
    found._path = variable.path
    return found
