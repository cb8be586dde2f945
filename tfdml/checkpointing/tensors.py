"""Tensors in a file: the safetensors format, which holds plain numbers and no code.

Eight bytes with the length of the header; the header, JSON with each tensor's dtype, shape and
offsets; then the tensors' bytes, little-endian, one after the other.

Reference:
    https://github.com/huggingface/safetensors#format
"""

import dataclasses
import itertools
import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tfdml.checkpointing.files import Files, write_all

_DTYPES = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "U16": np.dtype("uint16"),
    "I16": np.dtype("int16"),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# Number of bytes that are written, and read for a checksum, at once.
CHUNK = 8 << 20


def write_tensors(
    files: Files, path: str, tensors: Mapping[str, np.ndarray], notes: Any
) -> tuple[int, int]:
    """Writes tensors to a new file, and makes its content durable.

    Args:
        files: File system to write to.
        path: Path of the file.
        tensors: Arrays of any shape, by name.
        notes: JSON-serialisable data for the header.

    Returns:
        Size of the file in bytes, and its CRC-32.

    Raises:
        TypeError: If a tensor has a dtype that the format does not support.
    """
    index: dict[str, Any] = {"__metadata__": {"notes": json.dumps(notes)}}
    position = 0
    for name, array in tensors.items():
        if array.dtype not in _CODES:
            raise TypeError(
                f"Tensors must have one of the dtypes {', '.join(map(str, _CODES))}. Received: "
                f"{name} of {array.dtype}."
            )
        index[name] = {
            "dtype": _CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    header = json.dumps(index, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = len(header).to_bytes(8, "little") + header
    checksum = zlib.crc32(start)
    file = files.create(path)
    try:
        write_all(files, file, start)
        for array in tensors.values():
            data = memoryview(_little_endian(array).reshape(-1).view(np.uint8))
            for begin in range(0, len(data), CHUNK):
                part = data[begin : begin + CHUNK]
                checksum = zlib.crc32(part, checksum)
                write_all(files, file, part)
        files.sync(file)
    finally:
        files.close(file)
    return len(start) + position, checksum


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose rows are read when they are asked for.

    Attributes:
        files: File system to read from.
        path: Path of the file.
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        begin: Position of its first byte in the file.
    """

    files: Files
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, last: int) -> np.ndarray:
        """Returns the tensor's rows from `first` to before `last`."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        begin, end = (self.begin + row * row_bytes for row in (first, last))
        flat = np.frombuffer(self.files.read(self.path, begin, end), self.dtype)
        return _little_endian(flat).reshape(last - first, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the tensor, of at least one axis, for `np.asarray`."""
        del copy
        return self.rows(0, self.shape[0]).astype(dtype or self.dtype, copy=False)


def stored_tensors(files: Files, path: str) -> tuple[dict[str, StoredTensor], Any]:
    """Returns the tensors of a file by name, and its notes; only its header is read."""
    length = int.from_bytes(files.read(path, 0, 8), "little")
    index = json.loads(files.read(path, 8, 8 + length))
    notes = json.loads(index.pop("__metadata__")["notes"])
    tensors = {
        name: StoredTensor(
            files,
            path,
            tuple(entry["shape"]),
            _DTYPES[entry["dtype"]],
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in index.items()
    }
    return tensors, notes


def read_some_tensors(
    files: Files, path: str, is_left: Callable[[str], bool]
) -> tuple[dict[str, np.ndarray | StoredTensor], Any]:
    """Returns the tensors and the notes of a file, some of which are only read when asked for.

    Args:
        files: File system to read from.
        path: Path of the file.
        is_left: Whether a tensor of this name stays in the file; it has at least one axis.
    """
    stored, notes = stored_tensors(files, path)
    found: dict[str, np.ndarray | StoredTensor] = {}
    # Neighbours in the file are read at once.
    for left, neighbours in itertools.groupby(stored.items(), lambda item: is_left(item[0])):
        tensors = dict(neighbours)
        found |= tensors if left else _read_neighbours(files, path, tensors)
    return found, notes


def _read_neighbours(
    files: Files, path: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, np.ndarray]:
    first, *_, last = [*tensors.values()] * 2
    end = last.begin + last.nbytes
    data = files.read(path, first.begin, end) if end > first.begin else b""
    found = {}
    for name, tensor in tensors.items():
        begin, count = tensor.begin - first.begin, math.prod(tensor.shape)
        flat = np.frombuffer(data, tensor.dtype, count, begin) if count else np.zeros(0)
        found[name] = _little_endian(flat.astype(tensor.dtype, copy=False)).reshape(tensor.shape)
    return found


def read_tensors(data: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the tensors and the notes of a file; the tensors share the memory of `data`."""
    length = int.from_bytes(data[:8], "little")
    index = json.loads(data[8 : 8 + length])
    notes = json.loads(index.pop("__metadata__")["notes"])
    tensors = {}
    for name, entry in index.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(memoryview(data)[begin:end], _DTYPES[entry["dtype"]])
        tensors[name] = _little_endian(flat).reshape(entry["shape"])
    return tensors, notes


def _little_endian(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.byteswap() if sys.byteorder == "big" else array
