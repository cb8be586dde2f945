"""Framing of records in a TFRecord file: the length, and checksums of the length and the data."""

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

# Before a record: its length (8 bytes) and that length's checksum (4); after it: its checksum (4).
HEADER, FOOTER = 12, 4
FRAME = HEADER + FOOTER
# Protocol buffers are limited to 2 GiB: TensorFlow could not parse a longer record.
LARGEST_RECORD = 2**31 - 1

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
crc32c = google_crc32c.value


class BadRecord(ValueError):
    """A record whose bytes are damaged.

    Attributes:
        reason: Description of the damage.
    """

    def __init__(self, reason: str, where: str = ""):
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason


class Frames(NamedTuple):
    """Framed records, concatenated.

    Attributes:
        data: Bytes of all frames.
        lengths: Size of each record in bytes, without its frame: int64, `[records]`.
    """

    data: bytes
    lengths: np.ndarray


def mask(crc: Any) -> Any:
    """Returns a CRC-32C, or an array of them, masked as in TFRecord files: rotated and offset."""
    return (((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) & 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    """Returns the masked CRC-32C of data, as TFRecord files store it."""
    return mask(crc32c(data))


@functools.lru_cache(maxsize=4096)
def _header(length: int) -> bytes:
    packed = _LENGTH.pack(length)
    return packed + _CHECKSUM.pack(masked_crc(packed))


def check_length(record: bytes) -> None:
    """Raises a ValueError if a record is too long for TensorFlow to parse."""
    if len(record) > LARGEST_RECORD:
        raise ValueError(
            f"A record must have fewer than 2 GiB, the limit of protocol buffers. Received: "
            f"{len(record)} bytes. Split it, or store a path instead of the data."
        )


def frame(record: bytes) -> bytes:
    """Returns a record with its length and checksums around it.

    Raises:
        ValueError: If the record is too long for TensorFlow to parse.
    """
    check_length(record)
    return b"".join((_header(len(record)), record, _CHECKSUM.pack(masked_crc(record))))


def framed(records: Sequence[bytes]) -> Frames:
    """Returns records with their lengths and checksums around them, see `frame`."""
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    return Frames(b"".join(map(frame, records)), lengths)


def cut(data: bytes, sizes: np.ndarray) -> list[bytes]:
    """Splits bytes into consecutive parts of the given sizes."""
    ends = np.cumsum(sizes)
    return [data[b:e] for b, e in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]


def unframe(data: bytes, begin: int, length: int) -> bytes:
    """Returns the record whose frame begins at `begin`, after checking it.

    Args:
        data: Bytes that hold the frame.
        begin: Offset of the frame in `data`.
        length: Expected size of the record in bytes, from the index.

    Raises:
        BadRecord: If the frame is truncated, its length differs, or a checksum is wrong.
    """
    end = begin + FRAME + length
    if end > len(data):
        raise BadRecord(f"the file ends {end - len(data)} bytes too early")
    (found,) = _LENGTH.unpack_from(data, begin)
    if found != length or _CHECKSUM.unpack_from(data, begin + 8)[0] != masked_crc(
        data[begin : begin + 8]
    ):
        raise BadRecord("its length is damaged")
    record = data[begin + HEADER : end - FOOTER]
    if _CHECKSUM.unpack_from(data, end - FOOTER)[0] != masked_crc(record):
        raise BadRecord("its checksum is wrong")
    return record


class Frame(NamedTuple):
    """A record and its position in a file.

    Attributes:
        offset: Offset of its frame in the file, decompressed.
        record: The record, without its frame.
    """

    offset: int
    record: bytes


def scan(stream, name: str) -> Iterator[Frame]:
    """Yields the records of an open file that has no index, checking each one.

    Args:
        stream: File opened for reading bytes, decompressed.
        name: Name of the file in error messages.

    Raises:
        BadRecord: At the first damaged record. The message has the file, record and offset.
    """
    offset = number = 0
    while header := stream.read(HEADER):
        where = f"{name}, record {number}, offset {offset}"
        if len(header) < HEADER:
            raise BadRecord("the file ends within a length", where)
        (length,) = _LENGTH.unpack_from(header)
        if _CHECKSUM.unpack_from(header, 8)[0] != masked_crc(header[:8]):
            raise BadRecord("its length is damaged", where)
        body = stream.read(length + FOOTER)
        if len(body) < length + FOOTER:
            raise BadRecord("the file ends within it", where)
        record = body[:length]
        if _CHECKSUM.unpack_from(body, length)[0] != masked_crc(record):
            raise BadRecord("its checksum is wrong", where)
        yield Frame(offset, record)
        offset += FRAME + length
        number += 1
