"""Data sets of TensorFlow Datasets and of Hugging Face's `datasets`, prepared on this machine."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from tfdml.data import optional
from tfdml.data.format import storage
from tfdml.data.format.inference import array_feature, infer
from tfdml.data.format.schema import FLOAT, IMAGE, INT64, STRING, Feature, Schema
from tfdml.data.sources.source import Chunk, Row, Source

CHUNK_ROWS = 2048


class _Ranges(Source):
    """Source whose rows can be read by number."""

    def __init__(self, path: str, rows: int, row_bytes: int):
        self._path, self._count, self._row_bytes = path, rows, max(1, row_bytes)
        self.folder = path
        if not rows:
            raise ValueError(f"An input must have rows. Received: none in {path}.")

    @property
    def files(self) -> list[str]:
        """Paths of the data set's files."""
        return [storage.join(self._path, n) for n in storage.names_in(self._path) if "." in n]

    def chunks(self) -> list[Chunk]:
        """Returns ranges of rows."""
        ends = [min(b + CHUNK_ROWS, self._count) for b in range(0, self._count, CHUNK_ROWS)]
        begins = [0, *ends[:-1]]
        return [
            Chunk((b, e), e - b, (e - b) * self._row_bytes)
            for b, e in zip(begins, ends, strict=True)
        ]

    def read(self, chunk: Chunk, begin: int, end: int) -> Iterator[Row]:
        """Yields rows `begin` to `end` (exclusive) of a chunk."""
        first, _ = chunk.key
        return self.rows((first + begin, first + end))


class TfdsSource(_Ranges):
    """A split of a data set that TensorFlow Datasets has prepared.

    Images keep their bytes.

    Args:
        path: Directory of the prepared version.
        split: Name of the split.

    Raises:
        MissingPackageError: If the package is not installed.
        ValueError: If the split does not exist.
    """

    def __init__(self, path: str, split: str = "train"):
        builder = _builder(path)
        if split not in builder.info.splits:
            raise ValueError(
                f"`split` must be one of {sorted(builder.info.splits)}. Received: {split!r}."
            )
        about = builder.info.splits[split]
        self._split = split
        super().__init__(path, about.num_examples, about.num_bytes // max(1, about.num_examples))
        self.schema = Schema(_tfds_features("", builder.info.features))

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a range of numbers."""
        tfds = _tfds()
        builder = _builder(self._path)
        begin, end = key
        decoders = {
            name: tfds.decode.SkipDecoding()
            for name, feature in builder.info.features.items()
            if isinstance(feature, tfds.features.Image)
        }
        part = tfds.core.ReadInstruction(self._split, from_=begin, to=end, unit="abs")
        read = tfds.ReadConfig(interleave_cycle_length=1)
        rows = builder.as_dataset(split=part, decoders=decoders, read_config=read)
        for i, row in enumerate(tfds.as_numpy(rows)):
            where = f"{self._path}, {self._split}, row {begin + i}"
            yield Row(where, {name: _plain(value) for name, value in _flat("", row)})


def _builder(path: str) -> Any:
    return _tfds().builder_from_directory(path)


def _tfds() -> ModuleType:
    return optional.load("tensorflow_datasets", "Reading a data set of TensorFlow Datasets")


def _flat(prefix: str, row: Any) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> Any:
    if hasattr(value, "to_list"):
        return value.to_list()
    return value


def _tfds_features(prefix: str, features: Any) -> Iterator[tuple[str, Feature]]:
    tfds = _tfds()
    for name, feature in features.items():
        key = f"{prefix}{name}"
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from _tfds_features(f"{key}.", feature)
        elif isinstance(feature, tfds.features.ClassLabel):
            yield key, Feature(INT64, classes=tuple(feature.names or ()))
        elif isinstance(feature, tfds.features.Image):
            yield key, Feature(IMAGE)
        else:
            shape = tuple(feature.shape)
            dtype = np.dtype(feature.np_dtype)
            if dtype.kind in "OSU":
                yield key, Feature(STRING, shape)
            elif None in shape:
                yield key, Feature(FLOAT if dtype.kind == "f" else INT64, shape)
            else:
                yield key, array_feature(shape, dtype)


def _hugging_face() -> ModuleType:
    return optional.load("datasets", "Reading a data set of Hugging Face")


class HuggingFaceSource(_Ranges):
    """A data set that Hugging Face's `datasets` has saved to disk.

    Args:
        path: Directory that was passed to `save_to_disk`.
        split: Name of the split, if there are several.

    Raises:
        MissingPackageError: If the package is not installed.
        ValueError: If the split does not exist.
    """

    def __init__(self, path: str, split: str | None = None):
        self._split = split
        rows = self._open(path)
        self._data = rows
        super().__init__(path, len(rows), rows.data.nbytes // max(1, len(rows)))
        datasets = _hugging_face()
        sample = infer(values.values for values in self.rows((0, min(len(rows), 100))))
        for name, feature in rows.features.items():
            if isinstance(feature, datasets.ClassLabel):
                sample[name] = Feature(INT64, classes=tuple(feature.names))
            elif isinstance(feature, datasets.Image):
                sample[name] = Feature(IMAGE)
        self.schema = sample

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}

    def _open(self, path: str) -> Any:
        datasets = _hugging_face()
        data = datasets.load_from_disk(path)
        if isinstance(data, datasets.DatasetDict):
            if self._split not in data:
                raise ValueError(
                    f"`split` must be one of {sorted(data)}. Received: {self._split!r}."
                )
            data = data[self._split]
        for name, feature in data.features.items():
            if isinstance(feature, datasets.Image):
                data = data.cast_column(name, datasets.Image(decode=False))
        return data

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a range of numbers."""
        datasets = _hugging_face()
        if self._data is None:
            self._data = self._open(self._path)
        begin, end = key
        part = self._data[begin:end]
        images = {n for n, f in self._data.features.items() if isinstance(f, datasets.Image)}
        for i, values in enumerate(zip(*part.values(), strict=True)):
            row = dict(zip(part, values, strict=True))
            for name in images & row.keys():
                row[name] = row[name]["bytes"]
            yield Row(f"{self._path}, row {begin + i}", row)
