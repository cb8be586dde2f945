"""`tf.train.Example` as bytes, without TensorFlow: conversion starts at once and stays fast.

The bytes are those that protocol buffers write deterministically: features sorted by name, numbers
packed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = b"\x0a", b"\x12", b"\x1a"
VALUE = b"\x0a"  # The only field of each list.
_SMALL = [bytes([i]) for i in range(128)]


def varint(number: int) -> bytes:
    """Returns a number from 0 to 2**64 - 1 in groups of 7 bits, lowest first."""
    if number < 128:
        return _SMALL[number]
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def varints(numbers: np.ndarray) -> bytes:
    """Returns integers as varints, one after the other; negative ones take 10 bytes.

    Args:
        numbers: Integers of shape `[n]` that fit int64.
    """
    bits = numbers.astype(np.int64).view(np.uint64)
    if not len(bits) or bits.max() < 128:
        return bits.astype(np.uint8).tobytes()
    shifts = np.arange(10, dtype=np.uint64) * np.uint64(7)
    groups = bits[:, None] >> shifts
    more = np.zeros(groups.shape, bool)
    more[:, :-1] = groups[:, 1:] != 0
    used = np.ones(groups.shape, bool)
    used[:, 1:] = more[:, :-1]
    return ((groups & np.uint64(127)).astype(np.uint8) | more * np.uint8(128))[used].tobytes()


def bytes_list(values: Sequence[bytes]) -> bytes:
    """Returns a Feature of byte strings."""
    body = b"".join([part for v in values for part in (VALUE, varint(len(v)), v)])
    return b"".join((_BYTES_LIST, varint(len(body)), body))


def one_bytes(value: bytes) -> bytes:
    """Returns a Feature of one byte string."""
    head = VALUE + varint(len(value))
    return b"".join((_BYTES_LIST, varint(len(head) + len(value)), head, value))


def _packed(kind: bytes, numbers: bytes) -> bytes:
    if not numbers:
        return kind + b"\x00"
    head = VALUE + varint(len(numbers))
    return b"".join((kind, varint(len(head) + len(numbers)), head, numbers))


def float_list(values: np.ndarray) -> bytes:
    """Returns a Feature of float32 numbers."""
    return _packed(_FLOAT_LIST, np.asarray(values, "<f4").tobytes())


def int64_list(values: np.ndarray) -> bytes:
    """Returns a Feature of integers."""
    return _packed(_INT64_LIST, varints(np.asarray(values)))


def one_int64(value: int) -> bytes:
    """Returns a Feature of one integer."""
    return _packed(_INT64_LIST, varint(value & 0xFFFFFFFFFFFFFFFF))


def encoder(
    features: Sequence[tuple[str, str, Callable[[Any], bytes]]],
) -> Callable[[Mapping], bytes]:
    """Returns a function that serialises a record as an Example.

    Args:
        features: For each feature its name, the name of the record's value, and a function that
            makes a Feature from that value.
    """
    parts = []
    for name, source, make in sorted(features, key=lambda f: f[0].encode()):
        key = name.encode()
        parts.append((source, VALUE + varint(len(key)) + key + b"\x12", make))

    def encode(record: Mapping[str, Any]) -> bytes:
        entries = []
        for source, key, make in parts:
            value = make(record[source])
            size = varint(len(value))
            entries += (VALUE, varint(len(key) + len(size) + len(value)), key, size, value)
        body = b"".join(entries)
        return b"".join((VALUE, varint(len(body)), body))

    return encode


def decode(record: bytes) -> dict[str, list[bytes] | np.ndarray]:
    """Returns the features of a serialised Example: byte strings, or float32 or int64 arrays.

    Raises:
        ValueError: If the bytes are not an Example.
    """
    try:
        return dict(_entry(entry) for body in _fields(record, 1) for entry in _fields(body, 1))
    except (IndexError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError(
            "A record must be a serialised tf.train.Example. Received: other bytes."
        ) from error


def _entry(entry: bytes) -> tuple[str, list[bytes] | np.ndarray]:
    name = next(_fields(entry, 1)).decode()
    feature = next(_fields(entry, 2), b"")
    for kind, values in _all_fields(feature):
        if kind == 1:
            return name, list(_fields(values, 1))
        packed = b"".join(_fields(values, 1))
        if kind == 2:
            return name, np.frombuffer(packed, "<f4")
        return name, _integers(packed)
    return name, []


def _integers(packed: bytes) -> np.ndarray:
    numbers, offset = [], 0
    while offset < len(packed):
        number, offset = _read_varint(packed, offset)
        numbers.append(number)
    return np.array(numbers, np.uint64).view(np.int64)


def _fields(data: bytes, wanted: int):
    return (value for number, value in _all_fields(data) if number == wanted)


def _all_fields(data: bytes):
    """Yields the numbers and bytes of a message's fields; scalars as if they were packed."""
    offset = 0
    while offset < len(data):
        tag, offset = _read_varint(data, offset)
        wire = tag & 7
        begin = offset
        if wire == 2:
            length, begin = _read_varint(data, offset)
            offset = begin + length
        elif wire == 0:
            _, offset = _read_varint(data, offset)
        elif wire in (1, 5):
            offset += 8 if wire == 1 else 4
        else:
            raise IndexError
        if offset > len(data):
            raise IndexError
        yield tag >> 3, data[begin:offset]


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, offset
        shift += 7
        if shift > 63:
            raise IndexError
