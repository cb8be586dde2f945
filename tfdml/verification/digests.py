"""Digests of rows and projections of tensors, by which runs are compared."""

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

# Numbers of a row, or of a tensor without rows, that are kept as they are; more are projected.
_WHOLE_ROW, _WHOLE_TENSOR = 64, 4096
_PROJECTIONS = 64


def row_digests(parts: Sequence[np.ndarray | list], rows: int) -> np.ndarray:
    """Returns a digest of each row of a batch.

    Args:
        parts: The batch's arrays of shape `[rows, ...]`, or lists of a value for each row.
        rows: The number of rows.

    Returns:
        uint64, shape `[rows]`.
    """
    found = []
    for row in range(rows):
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            value = part[row]
            is_numeric = isinstance(value, np.ndarray | np.generic) and value.dtype != object
            digest.update(value.tobytes() if is_numeric else repr(value).encode())
        found.append(int.from_bytes(digest.digest(), "little"))
    return np.array(found, np.uint64)


def project_rows(values: np.ndarray) -> np.ndarray:
    """Returns at most 64 numbers of each row: the numbers themselves, or projections of them.

    Args:
        values: Numbers of shape `[rows, ...]`.

    Returns:
        float64, shape `[rows, n]`.
    """
    return _projected(values.reshape(len(values), math.prod(values.shape[1:])), _WHOLE_ROW)


def project(values: np.ndarray) -> np.ndarray:
    """Returns the numbers of a tensor without rows, or 64 projections of them.

    Args:
        values: Numbers of any shape.

    Returns:
        float64, shape `[n]`.
    """
    return _projected(values.reshape(1, -1), _WHOLE_TENSOR)[0]


def _projected(table: np.ndarray, whole: int) -> np.ndarray:
    numbers = table.shape[1]
    if numbers <= whole:
        return table.astype(np.float64)
    signed = table.astype(np.float64) * _signs(numbers)
    padded = np.pad(signed, ((0, 0), (0, -numbers % _PROJECTIONS)))
    # Each number is in one projection, with a sign of its own.
    return padded.reshape(len(table), -1, _PROJECTIONS).sum(axis=1)


@functools.lru_cache(maxsize=64)
def _signs(numbers: int) -> np.ndarray:
    """Returns the same signs for the same number in each process: int8, shape `[numbers]`."""
    return np.random.default_rng(numbers).choice(np.array([-1, 1], np.int8), numbers)
