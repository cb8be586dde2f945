"""Existing TFRecords as an input, to be sharded again."""

import gzip
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdml.data.format import example, index, storage
from tfdml.data.format.framing import BadRecord, unframe
from tfdml.data.format.schema import FLOAT, IMAGE, INT64, STRING, Feature, Schema
from tfdml.data.sources.source import Chunk, Row, Source

SAMPLED_RECORDS = 1000
_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM")


class TfrecordSource(Source):
    """Files of `tf.train.Example`s; each record is checked and decoded.

    Args:
        paths: Paths of the files; one that ends in `.gz` is compressed.
        schema: Schema of the records; inferred from the first ones by default.

    Raises:
        BadRecord: If a file without an index is damaged.
        ValueError: If records are not Examples.
    """

    def __init__(self, paths: list[str], schema: Schema | None = None):
        self._paths = paths
        self._indices = {
            path: index.read(path) if storage.exists(path + index.SUFFIX) else index.build(path)
            for path in paths
        }
        if not any(len(found.lengths) for found in self._indices.values()):
            raise ValueError(f"An input must have records. Received: none in {paths}.")
        self.schema = schema or _infer(self._sample())

    def _sample(self) -> list[dict]:
        found = []
        for chunk in self.chunks():
            for _, record in self._records(chunk.key):
                if isinstance(record, bytes):
                    found.append(example.decode(record))
            if len(found) >= SAMPLED_RECORDS:
                break
        return found

    @property
    def files(self) -> list[str]:
        """Paths of the files."""
        return self._paths

    def chunks(self) -> list[Chunk]:
        """Returns the blocks of the files."""
        return [
            Chunk((path, block), int(found.block_records[block]), int(found.block_raw[block]))
            for path, found in self._indices.items()
            for block in range(len(found.block_records))
        ]

    def _records(self, key: Any) -> Iterator[tuple[str, bytes | BadRecord]]:
        path, block = key
        found = self._indices[path]
        stored = storage.read_range(
            path, int(found.block_offsets[block]), int(found.block_bytes[block])
        )
        data = gzip.decompress(stored) if path.endswith(".gz") else stored
        begins, lengths = found.frames_of(block)
        first = int(found.first_records[block])
        for i, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            where = f"{path}, record {first + i}"
            try:
                yield where, unframe(data, begin, length)
            except BadRecord as error:
                yield where, error

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the records of a block."""
        for where, record in self._records(key):
            if isinstance(record, BadRecord):
                yield Row(where, None, record.reason)
                continue
            try:
                yield Row(where, _values(example.decode(record), self.schema))
            except ValueError as error:
                yield Row(where, None, str(error))


def _infer(records: list[dict]) -> Schema:
    names = sorted({name for record in records for name in record})
    return Schema({n: _feature(n, [r[n] for r in records if n in r]) for n in names})


def _feature(name: str, values: list) -> Feature:
    # A feature without values does not reveal its type.
    kinds = {_kind(v) for v in values if len(v)} or {INT64}
    if len(kinds) != 1:
        raise ValueError(f"Feature {name!r} must be of one type. Received: {sorted(kinds)}.")
    (kind,), lengths = kinds, {len(v) for v in values}
    shape = (lengths.pop(),) if len(lengths) == 1 else (None,)
    if shape == (1,):
        shape = ()
        if kind == STRING and all(v[0].startswith(_IMAGE_STARTS) for v in values):
            kind = IMAGE
    return Feature(kind, shape)


def _kind(values: list[bytes] | np.ndarray) -> str:
    if isinstance(values, list):
        return STRING
    return FLOAT if values.dtype.kind == "f" else INT64


def _values(decoded: dict, schema: Schema) -> dict[str, Any]:
    """Returns the values from which an encoder of the schema makes the same record."""
    values: dict[str, Any] = {}
    for name, feature in schema.items():
        if feature.shape == (None, None):
            raise ValueError(f"{name!r} must not be a list of lists, to be read from TFRecords")
        if name not in decoded:
            raise ValueError(f"{name!r} is missing")
        found = decoded.pop(name)
        if feature.kind == "raw":
            values[name] = np.frombuffer(found[0], feature.dtype).reshape(feature.shape)
        elif feature.shape == ():
            if len(found) != 1:
                raise ValueError(f"{name!r} must have one value. Received: {len(found)}")
            values[name] = found[0]
        elif feature.is_variable:
            values[name] = found
        else:
            values[name] = np.array(found).reshape(feature.shape)
    values.update(decoded)
    return values
