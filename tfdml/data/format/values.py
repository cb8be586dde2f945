"""Checks of feature values, and their encoding as serialised Examples."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdml.data.format import example
from tfdml.data.format.schema import (
    FLAT_VALUES,
    IMAGE,
    INT64,
    RAW,
    ROW_LENGTHS,
    STRING,
    Feature,
    Schema,
    short,
)

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def encoder(
    schema: Schema, allow_nonfinite: bool | frozenset[str] = False
) -> Callable[[Mapping[str, Any]], bytes]:
    """Returns a function that encodes a record's values as a serialised Example.

    The function raises `ValueError`, with the feature and the reason, for a value that does not
    fit: nothing is rounded, wrapped or filled in silently.

    Args:
        schema: Schema of the records.
        allow_nonfinite: Whether NaN and infinity are allowed, or the features in which they are.
    """
    parts = []
    for name, feature in schema.items():
        parts += _makers(name, feature, allows_nonfinite(allow_nonfinite, name))
    encode, names = example.encoder(parts), frozenset(schema)

    def checked(record: Mapping[str, Any]) -> bytes:
        if record.keys() != names:
            raise ValueError(_differences(names, record))
        return encode(record)

    return checked


def allows_nonfinite(allow_nonfinite: bool | frozenset[str], name: str) -> bool:
    """Returns whether a feature may hold NaN and infinity; see `encoder`."""
    return allow_nonfinite if isinstance(allow_nonfinite, bool) else name in allow_nonfinite


def _differences(names: frozenset[str], record: Mapping[str, Any]) -> str:
    missing, more = sorted(names - record.keys()), sorted(map(str, record.keys() - names))
    differences = [f"columns {missing} are missing"] if missing else []
    differences += [f"columns {more} are not in the schema"] if more else []
    return " and ".join(differences)


def _makers(name: str, feature: Feature, allow_nonfinite: bool) -> list[tuple[str, str, Callable]]:
    """Returns the entries of an Example that store a feature, see `example.encoder`."""
    if feature.shape == (None, None):
        rows = Feature(feature.kind, (None,))
        flat = _named(name, _maker(rows, allow_nonfinite))

        def values(value):
            return flat([item for row in _rows(name, value) for item in row])

        def lengths(value):
            return example.int64_list(np.array([len(row) for row in _rows(name, value)], np.int64))

        return [(name + FLAT_VALUES, name, values), (name + ROW_LENGTHS, name, lengths)]
    return [(name, name, _named(name, _maker(feature, allow_nonfinite)))]


def _rows(name: str, value: Any) -> Any:
    if not isinstance(value, list | tuple | np.ndarray) or not all(
        isinstance(row, list | tuple | np.ndarray) for row in value
    ):
        raise ValueError(f"{name!r} must be a list of lists. Received: {short(value)}")
    return value


def _named(name: str, make: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def named(value):
        try:
            return make(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{name!r} {error}") from error

    return named


def _maker(feature: Feature, allow_nonfinite: bool) -> Callable[[Any], bytes]:
    """Returns a function that encodes a value as a Feature; it raises if the value does not fit."""
    if feature.kind == IMAGE:
        return _image
    if feature.kind == RAW:
        return lambda value: example.one_bytes(_raw(value, feature, allow_nonfinite))
    if feature.kind == STRING:
        if feature.shape == ():
            return lambda value: example.one_bytes(_text(value))
        return lambda value: example.bytes_list([_text(v) for v in _array(value, feature, object)])
    if feature.kind == INT64:
        top = len(feature.classes) or None
        if feature.shape == ():
            return lambda value: example.one_int64(_integer(value, top))
        return lambda value: example.int64_list(_integers(value, feature))
    if feature.shape == ():
        return lambda value: example.float_list(_float(value, allow_nonfinite))
    return lambda value: example.float_list(_floats(value, feature, allow_nonfinite))


def _image(value: Any) -> bytes:
    if not isinstance(value, bytes) or not value:
        raise ValueError(f"must be the bytes of an image file. Received: {short(value)}")
    return example.one_bytes(value)


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be a string. Received: {short(value)}")
    return value.encode()


def _integer(value: Any, classes: int | None) -> int:
    if not isinstance(value, int | np.integer | np.bool_):
        raise ValueError(f"must be an integer. Received: {short(value)}")
    value = int(value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"must fit int64, -2^63 to 2^63 - 1. Received: {value}")
    if classes is not None and not 0 <= value < classes:
        raise ValueError(f"must be a class from 0 to {classes - 1}. Received: {value}")
    return value


def _float(value: Any, allow_nonfinite: bool) -> np.ndarray:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"must be a number. Received: {short(value)}")
    return _float32(np.array([value], np.float64), allow_nonfinite)


def _float32(values: np.ndarray, allow_nonfinite: bool) -> np.ndarray:
    """Converts numbers to float32; raises if one is not finite or does not fit."""
    finite = np.isfinite(values)
    if not allow_nonfinite and not finite.all():
        raise ValueError(
            f"must be finite. Received: {values[~finite].flat[0]} (allow it with "
            f"`allow_nonfinite`, --allow-nonfinite)"
        )
    if values.dtype.itemsize > 4:
        large = finite & (np.abs(values) > LARGEST_FLOAT32)
        if large.any():
            raise ValueError(f"must fit float32. Received: {values[large].flat[0]}")
    return values.astype(np.float32)


def _array(value: Any, feature: Feature, dtype: Any = None) -> np.ndarray:
    """Returns a value as a flat array; raises if it does not have the feature's shape."""
    if value is None or isinstance(value, str | bytes):
        raise ValueError(f"must have shape {feature.shape}. Received: {short(value)}")
    try:
        array = np.asarray(value, dtype)
    except ValueError as error:
        raise ValueError(f"must be a regular array. Received: {short(value)}") from error
    fits = array.ndim == 1 if feature.is_variable else array.shape == feature.shape
    if not fits:
        raise ValueError(f"must have shape {feature.shape}. Received: shape {array.shape}")
    return array.ravel()


def _integers(value: Any, feature: Feature) -> np.ndarray:
    array = _array(value, feature)
    if not len(array):
        return array.astype(np.int64)
    if array.dtype.kind not in "biu" or (array.dtype == np.uint64 and array.max() >= 2**63):
        raise ValueError(
            f"must be integers that fit int64, -2^63 to 2^63 - 1. Received: {short(value)}"
        )
    return array.astype(np.int64)


def _floats(value: Any, feature: Feature, allow_nonfinite: bool) -> np.ndarray:
    array = _array(value, feature)
    if len(array) and array.dtype.kind not in "iuf":
        raise ValueError(f"must be numbers. Received: {short(value)}")
    return _float32(array, allow_nonfinite) if len(array) else array.astype(np.float32)


def _raw(value: Any, feature: Feature, allow_nonfinite: bool) -> bytes:
    array = np.asarray(value)
    if array.dtype.newbyteorder("=") != np.dtype(feature.dtype) or array.shape != feature.shape:
        raise ValueError(
            f"must be {feature.dtype} of shape {feature.shape}. Received: {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.dtype.kind == "f" and not allow_nonfinite and not np.isfinite(array).all():
        raise ValueError(
            "must be finite. Received: NaN or infinity (allow it with `allow_nonfinite`, "
            "--allow-nonfinite)"
        )
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
