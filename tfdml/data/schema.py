"""What a record holds: its features, how they are stored, and what values they accept."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tfdml.data import example

# How a feature is stored in an Example.
INT64, FLOAT, STRING, RAW, IMAGE = "int64", "float32", "string", "raw", "image"
_KINDS = (INT64, FLOAT, STRING, RAW, IMAGE)
# What `tf.io.decode_raw` can read.
_RAW_DTYPES = (
    *("uint8", "int8", "uint16", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bool"),
)
# TensorFlow Datasets stores lists of lists under these names.
FLAT_VALUES, ROW_LENGTHS = "/ragged_flat_values", "/ragged_row_lengths_0"
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of every record.

    Attributes:
        kind: How it is stored: "int64", "float32" and "string" as lists of Examples; "raw" as the
            little-endian bytes of an array of `dtype`; "image" as the bytes of an image file.
        shape: Its shape: `()` for one value, `(28, 28)` for an array, `(None,)` for a list of any
            length, `(None, None)` for a list of lists.
        dtype: Of "raw", the NumPy name of its dtype.
        classes: The names of the classes that an integer stands for.
    """

    kind: str
    shape: tuple[int | None, ...] = ()
    dtype: str = ""
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"`kind` must be one of {_KINDS}. Received: kind={self.kind!r}.")
        if None in self.shape and self.shape not in ((None,), (None, None)):
            raise ValueError(
                f"`shape` must be fixed, (None,) or (None, None). Received: shape={self.shape}."
            )
        if self.kind == RAW and (self.dtype not in _RAW_DTYPES or None in self.shape):
            raise ValueError(
                f"A raw feature must have a fixed shape and a dtype of {_RAW_DTYPES}. Received: "
                f"shape={self.shape}, dtype={self.dtype!r}."
            )
        if self.kind == IMAGE and self.shape:
            raise ValueError(f"An image must have shape (). Received: shape={self.shape}.")

    @property
    def is_variable(self) -> bool:
        """Whether its length differs between records."""
        return None in self.shape

    def to_json(self) -> dict[str, Any]:
        """Returns what a manifest says of it."""
        said = {"kind": self.kind, "shape": list(self.shape)}
        if self.dtype:
            said["dtype"] = self.dtype
        if self.classes:
            said["classes"] = list(self.classes)
        return said


class Schema(dict[str, Feature]):
    """The features of every record, by name."""

    def to_json(self) -> dict[str, Any]:
        """Returns what a manifest says of them, in the order of their names."""
        return {name: self[name].to_json() for name in sorted(self)}

    @classmethod
    def from_json(cls, said: Mapping[str, Mapping[str, Any]]) -> "Schema":
        """Returns the schema that a manifest or a user's JSON says.

        Raises:
            ValueError: If it is not one.
        """
        if not isinstance(said, Mapping) or not said:
            raise ValueError(f"`schema` must name at least one feature. Received: {said!r}.")
        schema = cls()
        for name, feature in said.items():
            try:
                values = {"kind": feature} if isinstance(feature, str) else dict(feature)
                for field in ("shape", "classes"):
                    values[field] = tuple(values.get(field, ()))
                schema[name] = Feature(**values)
            except (TypeError, ValueError) as error:
                raise ValueError(f"`schema`, feature {name!r}: {error}") from error
        return schema

    def encoder(self, allow_nonfinite: bool = False) -> Callable[[Mapping[str, Any]], bytes]:
        """Returns a function that makes a serialised Example of a record's values.

        The function raises `ValueError`, which names the feature and the reason, for a value that
        does not fit: nothing is rounded, wrapped or filled in silently.

        Args:
            allow_nonfinite: Whether NaN and infinity are values.
        """
        parts = []
        for name, feature in self.items():
            parts += _makers(name, feature, allow_nonfinite)
        encode, names = example.encoder(parts), frozenset(self)

        def checked(record: Mapping[str, Any]) -> bytes:
            if record.keys() != names:
                raise ValueError(_differences(names, record))
            return encode(record)

        return checked


def _differences(names: frozenset[str], record: Mapping[str, Any]) -> str:
    missing, more = sorted(names - record.keys()), sorted(map(str, record.keys() - names))
    said = [f"columns {missing} are missing"] if missing else []
    said += [f"columns {more} are not in the schema"] if more else []
    return " and ".join(said)


def _makers(name: str, feature: Feature, allow_nonfinite: bool) -> list[tuple[str, str, Callable]]:
    """Returns the entries of an Example that a feature becomes, see `example.encoder`."""
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
        raise ValueError(f"{name!r} must be a list of lists. Received: {_short(value)}")
    return value


def _named(name: str, make: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def named(value):
        try:
            return make(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{name!r} {error}") from error

    return named


def _maker(feature: Feature, allow_nonfinite: bool) -> Callable[[Any], bytes]:
    """Returns what makes a Feature of a value; it raises if the value does not fit."""
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _image(value: Any) -> bytes:
    if not isinstance(value, bytes) or not value:
        raise ValueError(f"must be the bytes of an image file. Received: {_short(value)}")
    return example.one_bytes(value)


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be a string. Received: {_short(value)}")
    return value.encode()


def _integer(value: Any, classes: int | None) -> int:
    if not isinstance(value, int | np.integer | np.bool_):
        raise ValueError(f"must be an integer. Received: {_short(value)}")
    value = int(value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"must fit 64 bits. Received: {value}")
    if classes is not None and not 0 <= value < classes:
        raise ValueError(f"must be a class from 0 to {classes - 1}. Received: {value}")
    return value


def _float(value: Any, allow_nonfinite: bool) -> np.ndarray:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"must be a number. Received: {_short(value)}")
    return _float32(np.array([value], np.float64), allow_nonfinite)


def _float32(values: np.ndarray, allow_nonfinite: bool) -> np.ndarray:
    """Returns numbers as float32, if they are finite there too."""
    finite = np.isfinite(values)
    if not allow_nonfinite and not finite.all():
        raise ValueError(
            f"must be finite. Received: {values[~finite].flat[0]} (allow it by `allow_nonfinite`, "
            f"--allow-nonfinite)"
        )
    if values.dtype.itemsize > 4:
        large = finite & (np.abs(values) > _LARGEST_FLOAT32)
        if large.any():
            raise ValueError(f"must fit float32. Received: {values[large].flat[0]}")
    return values.astype(np.float32)


def _array(value: Any, feature: Feature, dtype: Any = None) -> np.ndarray:
    """Returns a flat array of a value that has the feature's shape."""
    if value is None or isinstance(value, str | bytes):
        raise ValueError(f"must have shape {feature.shape}. Received: {_short(value)}")
    try:
        array = np.asarray(value, dtype)
    except ValueError as error:
        raise ValueError(f"must be a regular array. Received: {_short(value)}") from error
    fits = array.ndim == 1 if feature.is_variable else array.shape == feature.shape
    if not fits:
        raise ValueError(f"must have shape {feature.shape}. Received: shape {array.shape}")
    return array.ravel()


def _integers(value: Any, feature: Feature) -> np.ndarray:
    array = _array(value, feature)
    if not len(array):
        return array.astype(np.int64)
    if array.dtype.kind not in "biu" or (array.dtype == np.uint64 and array.max() >= 2**63):
        raise ValueError(f"must be integers of 64 bits. Received: {_short(value)}")
    return array.astype(np.int64)


def _floats(value: Any, feature: Feature, allow_nonfinite: bool) -> np.ndarray:
    array = _array(value, feature)
    if len(array) and array.dtype.kind not in "iuf":
        raise ValueError(f"must be numbers. Received: {_short(value)}")
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
            "must be finite. Received: NaN or infinity (allow it by `allow_nonfinite`, "
            "--allow-nonfinite)"
        )
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def infer(records: Iterable[Mapping[str, Any]]) -> Schema:
    """Returns the schema that sample records fit.

    Integers and booleans are "int64", numbers with a point "float32", lists of any length of
    those; arrays of NumPy keep their dtype and shape.

    Args:
        records: Some records.

    Raises:
        ValueError: If there are none, or a column has no values, or values that do not go together.
    """
    seen: dict[str, set[Feature]] = {}
    count = 0
    for record in records:
        count += 1
        for name, value in record.items():
            found = seen.setdefault(str(name), set())
            if value is not None:
                found.add(feature_of(value, str(name)))
    if not count:
        raise ValueError("The input must hold at least one record. Received: none.")
    return Schema({name: _join(name, found) for name, found in seen.items()})


def feature_of(value: Any, name: str) -> Feature:
    """Returns the feature that one value would be.

    Raises:
        ValueError: If it could be none; `name` is what the error calls it.
    """
    if isinstance(value, bool | np.bool_ | int | np.integer):
        return Feature(INT64)
    if isinstance(value, float | np.floating):
        return Feature(FLOAT)
    if isinstance(value, str | bytes):
        return Feature(STRING)
    if isinstance(value, np.ndarray) and value.dtype.name in _RAW_DTYPES:
        return of_array(value.shape, value.dtype)
    if isinstance(value, list | tuple):
        inner = {feature_of(v, name) for v in value if v is not None}
        inner = _join(name, inner) if inner else None
        if inner is None:
            return Feature(INT64, (None,), "unknown")
        if inner.kind in (INT64, FLOAT, STRING) and inner.shape in ((), (None,)):
            return Feature(inner.kind, (None, *inner.shape), inner.dtype)
    raise ValueError(
        f"Column {name!r} must hold numbers, strings, NumPy arrays, or lists or lists of lists of "
        f"those. Received: {_short(value)}."
    )


def of_array(shape: tuple[int, ...], dtype: Any) -> Feature:
    """Returns the feature that an array of NumPy is stored as.

    Raises:
        ValueError: If its dtype cannot be stored.
    """
    kind, name = np.dtype(dtype).kind, np.dtype(dtype).newbyteorder("=").name
    if shape == () and kind in "biu":
        return Feature(INT64)
    if name == "float32":
        return Feature(FLOAT, shape)
    if name in _RAW_DTYPES:
        return Feature(RAW, shape, name)
    if kind == "u":
        return Feature(INT64, shape)
    if kind in "SU":
        return Feature(STRING, shape)
    raise ValueError(f"An array must hold numbers or strings. Received: dtype {dtype}.")


def _join(name: str, found: set[Feature]) -> Feature:
    """Returns the feature that values of all these features fit."""
    # A list without values goes with any list.
    known = {f for f in found if f.dtype != "unknown"} or {Feature(f.kind, f.shape) for f in found}
    if len(known) == 1:
        return known.pop()
    shapes = {f.shape for f in known}
    if len(shapes) == 1 and {f.kind for f in known} == {INT64, FLOAT}:
        return Feature(FLOAT, shapes.pop())
    if not known:
        raise ValueError(f"Column {name!r} must have a value in the sampled rows. Received: none.")
    said = sorted(f"{f.kind} {f.shape}" for f in known)
    raise ValueError(
        f"Column {name!r} must hold values of one type. Received: {', '.join(said)}. Give a schema."
    )
