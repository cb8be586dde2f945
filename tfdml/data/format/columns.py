"""Encoding of many rows at once: NumPy makes the bytes of framed Examples from columns.

The bytes are those that `values.encoder` makes one by one. This module does not report what is
wrong with a row: if a value does not fit, or a feature has no fixed form, it returns None, and the
caller encodes the rows one by one, which reports it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdml.data.format import framing
from tfdml.data.format.example import VALUE, varint
from tfdml.data.format.framing import FOOTER, HEADER, Frames, crc32c, mask
from tfdml.data.format.schema import FLOAT, INT64, RAW, STRING, Feature, Schema
from tfdml.data.format.values import LARGEST_FLOAT32, allows_nonfinite

# Tag of the field that holds a list of each kind.
_LISTS = {STRING: b"\x0a", RAW: b"\x0a", FLOAT: b"\x12", INT64: b"\x1a"}
# Rows with longer lists of integers are encoded one by one.
_MOST_INTEGERS = 32
# Strings are padded to the longest one, unless most of the table would be empty.
_WIDEST_STRING, _MOST_EMPTY = 64, 4


class Piece(NamedTuple):
    """Part of the bytes of every record.

    Attributes:
        table: Bytes: uint8, `[rows, width]`, or `[1, width]` if they are the same in all records.
        used: Number of these bytes that each record has: int64, `[rows]`; None for all.
    """

    table: np.ndarray
    used: np.ndarray | None = None

    @property
    def size(self) -> int | np.ndarray:
        """Number of bytes in each record."""
        return self.table.shape[1] if self.used is None else self.used


def encode(
    schema: Schema, columns: Mapping[str, Any], allow_nonfinite: bool | frozenset[str] = False
) -> Frames | None:
    """Returns the framed records of all rows; None if they must be encoded one by one.

    Args:
        schema: Schema of the records.
        columns: Values of all rows for each feature: an array of shape `[rows, *shape]`, or a
            sequence of strings.
        allow_nonfinite: Whether NaN and infinity are allowed, or the features in which they are.
    """
    if columns.keys() != schema.keys():
        return None
    body: list[Piece] = []
    for name in sorted(schema, key=str.encode):
        value = _value(schema[name], columns[name], allows_nonfinite(allow_nonfinite, name))
        if value is None:
            return None
        key = name.encode()
        body += _field(VALUE, _constant(VALUE, varint(len(key)), key), *_field(b"\x12", *value))
    rows = len(next(iter(columns.values())))
    return _framed(_field(VALUE, *body), rows)


def _value(feature: Feature, column: Any, allow_nonfinite: bool) -> list[Piece] | None:
    """Returns the pieces of a Feature; None if a value does not fit or has no fixed form."""
    if feature.is_variable or feature.kind not in _LISTS or 0 in feature.shape:
        return None
    if feature.kind == STRING:
        content = _strings(column) if feature.shape == () else None
    elif np.shape(column)[1:] != feature.shape:
        content = None
    else:
        array = np.asarray(column)
        flat = array.reshape(len(array), -1)
        if feature.kind == INT64:
            content = _integers(flat, len(feature.classes))
        elif feature.kind == FLOAT:
            content = _floats(flat, allow_nonfinite)
        else:
            content = _raw(flat, feature.dtype, allow_nonfinite)
    return None if content is None else _field(_LISTS[feature.kind], *_field(VALUE, *content))


def _constant(*parts: bytes) -> Piece:
    return Piece(np.frombuffer(b"".join(parts), np.uint8)[None])


def _field(tag: bytes, *content: Piece) -> list[Piece]:
    """Returns a length-delimited field: its tag, length and content."""
    return [_constant(tag), _varints(sum(piece.size for piece in content)), *content]


def _varints(numbers: int | np.ndarray) -> Piece:
    """Returns numbers in groups of 7 bits, lowest first; see `example.varint`."""
    if not isinstance(numbers, np.ndarray):
        return _constant(varint(numbers))
    bits = numbers.astype(np.int64).view(np.uint64)
    width = max(1, -(-int(bits.max()).bit_length() // 7))
    groups = bits[:, None] >> (np.arange(width, dtype=np.uint64) * np.uint64(7))
    more = groups[:, 1:] != 0
    table = (groups & np.uint64(127)).astype(np.uint8)
    table[:, :-1] |= more.astype(np.uint8) << 7
    return Piece(table, None if more.all() else 1 + more.sum(1))


def _integers(values: np.ndarray, classes: int) -> list[Piece] | None:
    if values.dtype.kind not in "biu" or values.shape[1] > _MOST_INTEGERS:
        return None
    top = classes or 2**63
    if values.dtype.kind == "u" and values.max() >= top:
        return None
    if classes and (values.min() < 0 or values.max() >= classes):
        return None
    return [_varints(values[:, i]) for i in range(values.shape[1])]


def _floats(values: np.ndarray, allow_nonfinite: bool) -> list[Piece] | None:
    if values.dtype.kind not in "iuf":
        return None
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    finite = np.isfinite(values)
    if not allow_nonfinite and not finite.all():
        return None
    if values.dtype.itemsize > 4 and (finite & (np.abs(values) > LARGEST_FLOAT32)).any():
        return None
    return [_bytes_of(values.astype("<f4"))]


def _raw(values: np.ndarray, dtype: str, allow_nonfinite: bool) -> list[Piece] | None:
    if values.dtype.newbyteorder("=") != np.dtype(dtype):
        return None
    if values.dtype.kind == "f" and not allow_nonfinite and not np.isfinite(values).all():
        return None
    return [_bytes_of(values.astype(values.dtype.newbyteorder("<")))]


def _bytes_of(values: np.ndarray) -> Piece:
    return Piece(np.ascontiguousarray(values).view(np.uint8))


def _strings(values: Sequence[str | bytes]) -> list[Piece] | None:
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not all(isinstance(v, str | bytes) for v in values):
        return None
    encoded = [v.encode() if isinstance(v, str) else v for v in values]
    used = np.fromiter(map(len, encoded), np.int64, len(encoded))
    if used.max() > _WIDEST_STRING + _MOST_EMPTY * used.mean():
        return None
    table = np.array(encoded, "S")
    return [Piece(table.view(np.uint8).reshape(len(encoded), -1), used)]


def _framed(record: list[Piece], rows: int) -> Frames | None:
    """Returns records with their lengths and checksums around them; None if one is too long."""
    lengths = np.broadcast_to(np.asarray(sum(piece.size for piece in record), np.int64), rows)
    sizes, which = np.unique(lengths, return_inverse=True)
    if sizes[-1] > framing.LARGEST_RECORD:
        return None
    heads = [int(size).to_bytes(8, "little") for size in sizes]
    heads = [head + int(mask(crc32c(head))).to_bytes(4, "little") for head in heads]
    head = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, HEADER)[which]
    data = _joined([Piece(head), *record, Piece(np.zeros((1, FOOTER), np.uint8))], rows)
    ends = np.cumsum(lengths + (HEADER + FOOTER)) - FOOTER
    raw = data.tobytes()
    begins = (ends - lengths).tolist()
    crcs = [crc32c(raw[b:e]) for b, e in zip(begins, ends.tolist(), strict=True)]
    crcs = mask(np.array(crcs, np.uint32)).astype("<u4").view(np.uint8).reshape(-1, FOOTER)
    data[ends[:, None] + np.arange(FOOTER)] = crcs
    return Frames(data.tobytes(), lengths)


def _joined(pieces: list[Piece], rows: int) -> np.ndarray:
    """Returns the concatenated bytes of all records: uint8."""
    width = sum(piece.table.shape[1] for piece in pieces)
    table = np.empty((rows, width), np.uint8)
    used_bytes = None
    first = 0
    for piece in pieces:
        columns = slice(first, first + piece.table.shape[1])
        table[:, columns] = piece.table
        if piece.used is not None:
            used_bytes = np.ones((rows, width), bool) if used_bytes is None else used_bytes
            used_bytes[:, columns] = np.arange(piece.table.shape[1]) < piece.used[:, None]
        first = columns.stop
    return table.ravel() if used_bytes is None else table[used_bytes]
