"""Parquet files: a chunk is a row group."""

from collections.abc import Iterator
from typing import Any

from tfdml.data import optional
from tfdml.data.format import storage
from tfdml.data.format.schema import FLOAT, INT64, STRING, Feature, Schema
from tfdml.data.sources.jsonl import flatten
from tfdml.data.sources.source import Chunk, Row, Source

pa = optional.load("pyarrow", "Reading Parquet")
pq = optional.load("pyarrow.parquet", "Reading Parquet")

_BATCH_ROWS = 4096


class ParquetSource(Source):
    """Parquet files with the same columns; structs become dotted names, lists stay lists.

    Args:
        paths: Paths of the files.
        schema: Schema of the columns; that of the files by default.

    Raises:
        ValueError: If a file is damaged, files differ in their columns, or a column has a type that
            records cannot hold.
    """

    def __init__(self, paths: list[str], schema: Schema | None = None):
        self._paths = paths
        arrow = [self._open(path).schema_arrow.remove_metadata() for path in paths]
        for path, columns in zip(paths, arrow, strict=True):
            if not columns.equals(arrow[0]):
                raise ValueError(
                    f"All files must have the same columns. Received: {columns} in {path}, and "
                    f"{arrow[0]} in {paths[0]}."
                )
        twice = sorted({c for c in arrow[0].names if arrow[0].names.count(c) > 1})
        if twice:
            raise ValueError(f"Columns must have unique names. Received: {twice} twice.")
        self.schema = schema or Schema(
            feature for field in arrow[0] for feature in _features(field.name, field.type)
        )

    @staticmethod
    def _open(path: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(storage.open_read(path))
        except pa.ArrowInvalid as error:
            raise ValueError(f"An input must be undamaged. Received: {path}; {error}") from error

    @property
    def files(self) -> list[str]:
        """Paths of the files."""
        return self._paths

    def chunks(self) -> list[Chunk]:
        """Returns the row groups."""
        found = []
        for path in self._paths:
            metadata, first = self._open(path).metadata, 0
            for group in range(metadata.num_row_groups):
                about = metadata.row_group(group)
                found.append(Chunk((path, group, first), about.num_rows, about.total_byte_size))
                first += about.num_rows
        return [chunk for chunk in found if chunk.rows]

    def columns(self, chunk: Chunk, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields the columns of a row group, a few thousand rows at a time, if they are plain."""
        path, group, _ = chunk.key
        if any(f.is_variable for f in self.schema.values()):
            return
        first = 0
        with self._open(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                part = batch.slice(max(0, begin - first), max(0, end - max(begin, first)))
                first += batch.num_rows
                if not part.num_rows:
                    continue
                if any(c.null_count or pa.types.is_nested(c.type) for c in part.columns):
                    return
                yield {
                    name: column.to_numpy(zero_copy_only=False)
                    for name, column in zip(part.schema.names, part.columns, strict=True)
                }

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a row group; a few thousand are in memory at a time."""
        path, group, number = key
        with self._open(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                names = batch.schema.names
                columns = [column.to_pylist() for column in batch.columns]
                for values in zip(*columns, strict=True):
                    row = dict(zip(names, values, strict=True))
                    where = f"{path}, row {number}"
                    yield _row(where, row)
                    number += 1


def _row(where: str, values: dict[str, Any]) -> Row:
    flat = flatten(values)
    nulls = [name for name, value in flat.items() if value is None]
    if nulls:
        return Row(where, None, f"columns {nulls} must have values. Received: null")
    return Row(where, flat)


def _features(name: str, kind: pa.DataType) -> Iterator[tuple[str, Feature]]:
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _features(f"{name}.{field.name}", field.type)
        return
    shape: tuple[int | None, ...] = ()
    inner = kind
    while pa.types.is_list(inner) or pa.types.is_large_list(inner):
        inner, shape = inner.value_type, (None, *shape)
    if pa.types.is_fixed_size_list(inner) and not shape:
        inner, shape = inner.value_type, (inner.list_size,)
    stored = _kind(inner)
    if stored is None or len(shape) > 2:
        raise ValueError(
            f"Column {name!r} must hold numbers, strings, bytes, or lists or lists of lists of "
            f"those. Received: {kind}. Convert or drop it first."
        )
    yield name, Feature(stored, shape)


def _kind(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return INT64
    if pa.types.is_floating(kind):
        return FLOAT
    if any(
        test(kind)
        for test in (
            *(pa.types.is_string, pa.types.is_large_string),
            *(pa.types.is_binary, pa.types.is_large_binary),
        )
    ):
        return STRING
    return None
