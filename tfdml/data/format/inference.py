"""Inference of a schema from sample records."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tfdml.data.format.schema import FLOAT, INT64, RAW, RAW_DTYPES, STRING, Feature, Schema, short


def infer(records: Iterable[Mapping[str, Any]]) -> Schema:
    """Infers a schema from sample records.

    Integers and booleans become "int64", other numbers "float32", and lists of them features of
    variable length. NumPy arrays keep their dtype and shape.

    Args:
        records: Sample records.

    Raises:
        ValueError: If there are no records, or a column has no values or incompatible ones.
    """
    seen: dict[str, set[Feature]] = {}
    count = 0
    for record in records:
        count += 1
        for name, value in record.items():
            found = seen.setdefault(str(name), set())
            if value is not None:
                found.add(infer_feature(value, str(name)))
    if not count:
        raise ValueError("The input must hold at least one record. Received: none.")
    # A nested object that is null in some rows has its fields in others.
    nulls = {n for n in seen if not seen[n] and any(o.startswith(f"{n}.") for o in seen)}
    return Schema({name: _join(name, found) for name, found in seen.items() if name not in nulls})


def infer_feature(value: Any, name: str) -> Feature:
    """Returns the feature that stores one value.

    Raises:
        ValueError: If no feature can store it; `name` is the column in the message.
    """
    if isinstance(value, bool | np.bool_ | int | np.integer):
        return Feature(INT64)
    if isinstance(value, float | np.floating):
        return Feature(FLOAT)
    if isinstance(value, str | bytes):
        return Feature(STRING)
    if isinstance(value, np.ndarray) and value.dtype.name in RAW_DTYPES:
        return array_feature(value.shape, value.dtype)
    if isinstance(value, list | tuple):
        inner = {infer_feature(v, name) for v in value if v is not None}
        inner = _join(name, inner) if inner else None
        if inner is None:
            return Feature(INT64, (None,), "unknown")
        if inner.kind in (INT64, FLOAT, STRING) and inner.shape in ((), (None,)):
            return Feature(inner.kind, (None, *inner.shape), inner.dtype)
    raise ValueError(
        f"Column {name!r} must hold numbers, strings, NumPy arrays, or lists or lists of lists of "
        f"those. Received: {short(value)}."
    )


def array_feature(shape: tuple[int, ...], dtype: Any) -> Feature:
    """Returns the feature that stores a NumPy array.

    Raises:
        ValueError: If its dtype cannot be stored.
    """
    kind, name = np.dtype(dtype).kind, np.dtype(dtype).newbyteorder("=").name
    if shape == () and kind in "biu":
        return Feature(INT64)
    if name == "float32":
        return Feature(FLOAT, shape)
    if name in RAW_DTYPES:
        return Feature(RAW, shape, name)
    if kind == "u":
        return Feature(INT64, shape)
    if kind in "SU":
        return Feature(STRING, shape)
    raise ValueError(f"An array must hold numbers or strings. Received: dtype {dtype}.")


def _join(name: str, found: set[Feature]) -> Feature:
    """Returns the feature that stores values of all these features."""
    # An empty list is compatible with any list.
    known = {f for f in found if f.dtype != "unknown"} or {Feature(f.kind, f.shape) for f in found}
    if len(known) == 1:
        return known.pop()
    shapes = {f.shape for f in known}
    if len(shapes) == 1 and {f.kind for f in known} == {INT64, FLOAT}:
        return Feature(FLOAT, shapes.pop())
    if not known:
        raise ValueError(
            f"Column {name!r} must have a value in the sampled rows. Received: none. Give its type "
            f"in `schema` (--schema), or leave it out (--drop {name})."
        )
    value_types = sorted(f"{f.kind} {f.shape}" for f in known)
    raise ValueError(
        f"Column {name!r} must hold values of one type. Received: {', '.join(value_types)}. "
        f"Give a schema."
    )
