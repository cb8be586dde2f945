"""Partitioned variables, with parts on several servers, as Keras and optimizers see them.

A layer has one variable, whose value is TensorFlow's `ShardedVariable`: reading it joins the parts,
and files hold the whole. A model's list of trainable variables has the parts instead. So each part
gets its own gradient, sparse if only some rows were looked up, and an optimizer keeps each part's
slots on the part's server.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.checkpointing.row_blocks import BLOCK_BYTES, row_blocks
from tfdml.collectives.sparse_gradients import times


def as_array(sharded: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Converts a `ShardedVariable` to an array; becomes its `__array__` method."""
    del copy
    return np.asarray(sharded.numpy(), dtype)


def is_partitioned(variable: Any) -> bool:
    """Returns whether a Keras variable is partitioned."""
    return isinstance(getattr(variable, "_value", None), tf.__internal__.distribute.ShardedVariable)


def parts_of(variable: keras.Variable) -> list[keras.Variable]:
    """Returns a partitioned variable's parts, the same objects each time.

    Each part has the whole variable's path, and two attributes: `whole`, the variable that it is a
    part of, and `index`, its index.
    """
    sharded = variable._value
    if not hasattr(sharded, "_tfdml_parts"):
        sharded._tfdml_parts = [
            _part(variable, shard, index) for index, shard in enumerate(sharded.variables)
        ]
    return sharded._tfdml_parts


def _part(variable: keras.Variable, shard: tf.Variable, index: int) -> keras.Variable:
    part = copy.copy(variable)
    part._value = shard
    part._shape = tuple(shard.shape)
    part.whole, part.index = variable, index
    return part


def with_parts(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables, with each partitioned one replaced by its parts."""
    result: list[keras.Variable] = []
    for variable in variables:
        result += parts_of(variable) if is_partitioned(variable) else [variable]
    return result


def groups(variables: Sequence[Any]) -> list[list[int]]:
    """Groups the indices of variables by the whole that they are parts of, in order."""
    found: dict[Any, list[int]] = {}
    for index, variable in enumerate(variables):
        whole = getattr(variable, "whole", None)
        found.setdefault(id(variable) if whole is None else id(whole), []).append(index)
    return list(found.values())


# -- Slots -------------------------------------------------------------------------------------


def note_slot(slot: keras.Variable, reference: Any) -> None:
    """Records on an optimizer's slot the part that it belongs to."""
    if hasattr(reference, "whole"):
        slot.slot_of = reference


def whole_slots(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """Groups an optimizer's variables into those it would have without parts, as lists of parts."""
    result: list[list[keras.Variable]] = []
    # The k-th slot of a whole consists of the k-th slots of its parts.
    numbers: dict[int, int] = {}
    by_key: dict[tuple[int, int], list[keras.Variable]] = {}
    for variable in variables:
        part = getattr(variable, "slot_of", None)
        if part is None:
            result.append([variable])
            continue
        number = numbers.get(id(part), 0)
        numbers[id(part)] = number + 1
        key = (id(part.whole), number)
        if key not in by_key:
            result.append(by_key.setdefault(key, []))
        by_key[key].append(variable)
    return result


def is_in_parts(parts: Sequence[keras.Variable]) -> bool:
    """Returns whether a whole variable, given as its parts, is a partitioned one or its slot."""
    return hasattr(parts[0], "whole") or hasattr(parts[0], "slot_of")


def shape_of_whole(parts: Sequence[keras.Variable]) -> tuple[int, ...]:
    """Returns the shape of a whole variable, given its parts; one alone may have any shape."""
    if len(parts) == 1:
        return tuple(parts[0].shape)
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def joined(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the value of a whole variable, given those of its parts."""
    return values[0] if len(values) == 1 else np.concatenate(values)


def split_among(parts: Sequence[keras.Variable], value: np.ndarray) -> list[np.ndarray]:
    """Returns the values of a variable's parts, given that of the whole."""
    if len(parts) == 1:
        return [value]
    return np.split(value, np.cumsum([part.shape[0] for part in parts[:-1]]))


def blocks_of(parts: Sequence[keras.Variable]) -> Iterator[tuple[slice, np.ndarray]]:
    """Reads a whole variable from its servers, by blocks of rows.

    Args:
        parts: The variable's parts.

    Yields:
        Indices of rows of the whole variable, and the rows.
    """
    for part, own, rows in part_blocks(parts):
        yield rows, tf.gather(part._value, tf.range(own.start, own.stop)).numpy()


def assign_blocks(parts: Sequence[keras.Variable], value: Any) -> None:
    """Assigns a whole variable's value to its parts, by blocks of rows.

    Args:
        parts: The variable's parts.
        value: Array, or part of a file, from which slices of rows are read.
    """
    for part, own, rows in part_blocks(parts):
        block = tf.cast(np.asarray(value[rows]), part._value.dtype)
        part._value.scatter_update(tf.IndexedSlices(block, tf.range(own.start, own.stop)))


def part_blocks(
    parts: Sequence[keras.Variable], block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[keras.Variable, slice, slice]]:
    """Yields a part, indices of some of its rows, and their indices in the whole.

    Args:
        parts: A variable's parts.
        block_bytes: See `row_blocks`.
    """
    begin = 0
    for part in parts:
        for own in row_blocks(part.shape, part._value.dtype.size, block_bytes):
            yield part, own, slice(begin + own.start, begin + own.stop)
        begin += part.shape[0]


# -- Gradients ---------------------------------------------------------------------------------


def clip_by_whole_norm(gradients: Sequence, variables: Sequence, norm: float) -> list:
    """Clips each variable's gradient by its norm; parts are clipped by the norm of the whole.

    Args:
        gradients: Dense or sparse gradients, or None.
        variables: The variables.
        norm: Maximum norm.
    """
    clipped = list(gradients)
    for indices in groups(variables):
        present = [i for i in indices if gradients[i] is not None]
        if present:
            # The norm of a sparse gradient is that of its rows as they are, as in TensorFlow.
            factor = norm / tf.maximum(tf.linalg.global_norm([gradients[i] for i in present]), norm)
            for i in present:
                clipped[i] = times(gradients[i], factor)
    return clipped
