"""Large variables in Keras's files, written and read by blocks of rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib

from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.parameter_server.partition import (
    assign_blocks,
    blocks_of,
    is_partitioned,
    shape_of_whole,
)
from tfdml.strategies.sharded.variable_parts import is_dealt


def store_rows(
    store: Any,
    key: str,
    shape: tuple[int, ...],
    dtype: str,
    blocks: Iterable[tuple[slice, np.ndarray]],
) -> None:
    """Stores a variable whose rows arrive block by block, which go into an HDF5 file as they do.

    Args:
        store: Mapping that is filled with values, by index.
        key: The variable's index.
        shape: The variable's shape.
        dtype: The variable's dtype.
        blocks: Indices of rows, and the rows, in their order.
    """
    # Keras keeps numbers of this dtype in a form of its own.
    if type(store) is not saving_lib.H5IOStore or dtype == "bfloat16":
        store[key] = np.concatenate([block for _, block in blocks])
        return
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    numbers = tf.as_dtype(dtype).as_numpy_dtype
    target = store._h5_entry_group.create_dataset(key, shape, numbers)
    for rows, block in blocks:
        target[rows] = block


def stored_rows(
    store: Any, key: str, shape: tuple[int, ...], path: str
) -> h5py.Dataset | np.ndarray:
    """Returns a stored variable; one in an HDF5 file reads only the rows that are asked for.

    Args:
        store: Mapping with values, by index.
        key: The variable's index.
        shape: The variable's shape.
        path: Its path, for the error.

    Raises:
        ValueError: If the stored variable has another shape.
    """
    stored = _dataset(store, key)
    if stored is None:
        stored = store[key]
    if tuple(stored.shape) != tuple(shape):
        raise ValueError(
            f"A table in a file must have the shape of the model's. Received: {stored.shape} for "
            f"{path}, which has {tuple(shape)}. Load it into the model that was saved."
        )
    return stored


def save_parts(store: Any, key: str, parts: Sequence[keras.Variable]) -> None:
    """Stores a variable whose parts are on servers, through blocks of its rows.

    Args:
        store: Mapping that is filled with values, by index.
        key: The variable's index.
        parts: Its parts; one part is a variable that is not divided.
    """
    if len(parts) == 1:
        store[key] = parts[0].numpy()  # A copy: a dict would hold the variable itself.
    else:
        store_rows(store, key, shape_of_whole(parts), parts[0].dtype, blocks_of(parts))


def load_parts(store: Any, key: str, parts: Sequence[keras.Variable]) -> None:
    """Loads a variable whose parts are on servers, through blocks of its rows; see `save_parts`."""
    if len(parts) == 1:
        parts[0].assign(store[key])
    else:
        assign_blocks(parts, stored_rows(store, key, shape_of_whole(parts), parts[0].path))


def _dataset(store: Any, key: str) -> h5py.Dataset | None:
    """Returns a variable's numbers in an HDF5 file; None where Keras has to read them as a whole.

    Keras refuses files that refer to other files, so what is not plainly here is left to it.
    """
    group = store._h5_entry_group if type(store) is saving_lib.H5IOStore else {}
    if key not in group or not isinstance(group.get(key, getlink=True), h5py.HardLink):
        return None
    found = group[key]
    is_plain = isinstance(found, h5py.Dataset) and not found.external and not found.is_virtual
    return found if is_plain and found.attrs.get("dtype") != "bfloat16" else None


def _is_memory_sufficient(original: Callable) -> Callable:
    """Has Keras use files on disk, not in memory, for models that hold parts of large variables."""

    def is_memory_sufficient(model: keras.Model) -> bool:
        has_parts = any(is_partitioned(v) or is_dealt(v) for v in model.variables)
        return not has_parts and original(model)

    return is_memory_sufficient


REPLACEMENTS: list[Replacement] = [
    (saving_lib, "is_memory_sufficient", _is_memory_sufficient),
]
