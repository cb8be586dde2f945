"""Arrays on disk: NumPy, HDF5 and IDX. A record is one row of every array."""

import gzip
import math
import zipfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from tfdml.data import optional
from tfdml.data.format import storage
from tfdml.data.format.inference import array_feature
from tfdml.data.format.schema import Feature, Schema
from tfdml.data.sources.selected_columns import ColumnOptions
from tfdml.data.sources.source import Chunk, Row, Source

CHUNK_BYTES = 4 << 20
_IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class ArraySource(Source):
    """Arrays of equal length.

    Args:
        arrays: Arguments of `open_array` for each feature: a file, and a name within it.
        schema: Schema of the rows; by default that of the arrays' dtypes and shapes.
        options: Arrays to leave out.

    Raises:
        ValueError: If an array cannot be read, or the arrays differ in length.
    """

    def __init__(
        self,
        arrays: dict[str, tuple[str, str]],
        schema: Schema | None = None,
        options: ColumnOptions | None = None,
    ):
        options = options or ColumnOptions()
        self._names = list(arrays)
        options.check_names(self._names)
        # Arrays that are left out need not fit the others.
        self._arrays = {name: where for name, where in arrays.items() if not options.drops(name)}
        self._opened: dict[str, Any] = {}
        opened = {name: self._array(name) for name in self._arrays}
        for name, array in opened.items():
            if not array.shape:
                raise ValueError(
                    f"An array must have rows. Received: {name!r} of shape (). Leave it out "
                    f"(--drop {name})."
                )
        lengths = {name: len(array) for name, array in opened.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"All arrays must have the same number of rows. Received: {lengths}. Leave out "
                f"those that are no data of rows (--drop NAME)."
            )
        self._length = next(iter(lengths.values()))
        if not self._length:
            raise ValueError(f"An input must have rows. Received: arrays of 0 rows, {lengths}.")
        self.schema = schema or Schema(
            {name: _feature(name, array) for name, array in opened.items()}
        )
        self._row_bytes = sum(
            math.prod(a.shape[1:]) * _dtype(a).itemsize + len(name) + 10
            for name, a in opened.items()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    @property
    def column_names(self) -> list[str]:
        """Names of all arrays."""
        return self._names

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold the arrays."""
        return sorted({path for path, _ in self._arrays.values()})

    def chunks(self) -> list[Chunk]:
        """Returns ranges of rows."""
        step = max(1, CHUNK_BYTES // self._row_bytes)
        sizes = [(begin, min(step, self._length - begin)) for begin in range(0, self._length, step)]
        return [Chunk((b, b + rows), rows, rows * self._row_bytes) for b, rows in sizes]

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a range."""
        begin, end = key
        names = list(self._arrays)
        columns = [_values(self._array(name)[begin:end]) for name in names]
        where = self.files[0]
        for i, values in enumerate(zip(*columns, strict=True)):
            yield Row(f"{where}, row {begin + i}", dict(zip(names, values, strict=True)))

    def columns(self, chunk: Chunk, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields rows `begin` to `end` (exclusive) of a chunk, as arrays."""
        first, _ = chunk.key
        rows = slice(first + begin, first + end)
        yield {name: self._array(name)[rows] for name in self._arrays}

    def read(self, chunk: Chunk, begin: int, end: int) -> Iterator[Row]:
        """Yields rows `begin` to `end` (exclusive) of a chunk."""
        first, _ = chunk.key
        return self.rows((first + begin, first + end))

    def _array(self, name: str) -> Any:
        if name not in self._opened:
            self._opened[name] = open_array(*self._arrays[name])
        return self._opened[name]


def _feature(name: str, array: Any) -> Feature:
    try:
        return array_feature(array.shape[1:], _dtype(array))
    except ValueError as error:
        raise ValueError(f"Array {name!r}: {error} Leave it out (--drop {name}).") from error


def _dtype(array: Any) -> np.dtype:
    # HDF5 strings have the dtype object in NumPy.
    if not isinstance(array, np.ndarray) and _hdf5().check_string_dtype(array.dtype):
        return np.dtype("S1")
    return array.dtype


def _hdf5() -> ModuleType:
    return optional.load("h5py", "Reading HDF5")


def _values(column: np.ndarray) -> Any:
    """Returns an array's rows, as Python numbers if each row is a scalar."""
    return column.tolist() if column.ndim == 1 else column


def arrays_in(path: str) -> dict[str, tuple[str, str]]:
    """Returns the arrays of a file by the names of their features, for `open_array`.

    Raises:
        MissingPackageError: If it is an HDF5 file and h5py is not installed.
        ValueError: If the file cannot be read.
    """
    try:
        if path.endswith(".npz"):
            with zipfile.ZipFile(storage.local_copy(path)) as archive:
                names = [n.removesuffix(".npy") for n in archive.namelist()]
            return {name: (path, name) for name in names}
        if path.endswith((".h5", ".hdf5")):
            h5py = _hdf5()
            names: list[str] = []
            with h5py.File(storage.local_copy(path)) as file:
                file.visititems(
                    lambda name, item: (
                        names.append(name) if isinstance(item, h5py.Dataset) else None
                    )
                )
            return {name.replace("/", "."): (path, name) for name in names}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"An input must be undamaged. Received: {path}; {error}.") from error
    stem = path.rsplit("/", 1)[-1].removesuffix(".gz").removesuffix(".npy")
    return {stem: (path, "")}


def open_array(path: str, name: str) -> Any:
    """Opens an array: memory-mapped where possible, read whole where it is compressed.

    Raises:
        MissingPackageError: If it is in an HDF5 file and h5py is not installed.
        ValueError: If it cannot be read, or only by running code that it holds.
    """
    is_hdf5 = path.endswith((".h5", ".hdf5"))
    h5py = _hdf5() if is_hdf5 else None
    try:
        if path.endswith(".npy"):
            array = np.load(storage.local_copy(path), mmap_mode="r", allow_pickle=False)
            return _plain(array, path)
        if path.endswith(".npz"):
            with np.load(storage.local_copy(path), allow_pickle=False) as archive:
                return _plain(archive[name], f"{path}, {name!r}")
        if is_hdf5:
            return h5py.File(storage.local_copy(path))[name]
        return read_idx(path)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, KeyError) as error:
        if "pickle" in str(error) or "Python objects" in str(error):
            raise ValueError(
                f"An array must hold numbers or strings. Received: {path}, of Python objects, "
                f"which are pickled: reading them could run code. Save it with a plain dtype."
            ) from error
        raise ValueError(f"An input must be undamaged. Received: {path}; {error}.") from error


def _plain(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.hasobject:
        raise ValueError(f"{name} holds pickled objects")
    return array


def read_idx(path: str) -> np.ndarray:
    """Reads an IDX array, the format of MNIST, compressed or not.

    Raises:
        ValueError: If the file is damaged, or of another format.
    """
    data = storage.read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_DTYPES:
        raise ValueError(f"{path} does not begin with an IDX header")
    dtype, dimensions = np.dtype(_IDX_DTYPES[data[2]]), data[3]
    if len(data) < 4 + 4 * dimensions:
        raise ValueError(f"{path} ends within its header")
    shape = tuple(np.frombuffer(data, ">u4", dimensions, 4).tolist())
    begin, size = 4 + 4 * dimensions, math.prod(shape) * dtype.itemsize
    if len(data) != begin + size:
        raise ValueError(f"{path} must hold {size} bytes of values, but holds {len(data) - begin}")
    array = np.frombuffer(data, dtype, offset=begin).reshape(shape)
    return array.astype(dtype.newbyteorder("="))
