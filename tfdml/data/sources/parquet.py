"""Parquet files: a chunk is a row group."""

from collections.abc import Iterator
from typing import Any

from tfdml.data import optional
from tfdml.data.format import storage
from tfdml.data.format.schema import FLOAT, INT64, STRING, Feature, Schema
from tfdml.data.sources.jsonl import flatten
from tfdml.data.sources.selected_columns import ColumnOptions
from tfdml.data.sources.source import Chunk, Row, Source

pa = optional.load("pyarrow", "Reading Parquet")
pq = optional.load("pyarrow.parquet", "Reading Parquet")

_BATCH_ROWS = 4096


class ParquetSource(Source):
    """Parquet files with the same columns; structs become dotted names, lists stay lists.

    Times, dates and durations become integers of their unit, and categories their values.

    Args:
        paths: Paths of the files.
        schema: Schema of the columns; that of the files by default.
        options: Columns to leave out.

    Raises:
        ValueError: If a file is damaged, files differ in their columns, or a column has a type that
            records cannot hold.
    """

    def __init__(
        self,
        paths: list[str],
        schema: Schema | None = None,
        options: ColumnOptions | None = None,
    ):
        self._paths, self._options = paths, options or ColumnOptions()
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
        self._names = [name for field in arrow[0] for name in _names(field.name, field.type)]
        self._options.check_names(self._names)
        # Columns that are left out are not read: records need not be able to hold them.
        fields = [field for field in arrow[0] if not self._options.drops(field.name)]
        self._stored = pa.schema([field.with_type(_stored(field.type)) for field in fields])
        self.notices = tuple(
            notice for field in fields for notice in _notices(field.name, field.type)
        )
        self.schema = schema or Schema(
            (name, feature)
            for field in self._stored
            for name, feature in _features(field.name, field.type)
            if not self._options.drops(name)
        )

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, fields of structs by dotted names."""
        return self._names

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": self._stored.serialize().to_pybytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stored = pa.ipc.read_schema(pa.py_buffer(state["_stored"]))

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
            for batch in self._batches(file, group):
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
            for batch in self._batches(file, group):
                names = batch.schema.names
                columns = [column.to_pylist() for column in batch.columns]
                for values in zip(*columns, strict=True):
                    row = dict(zip(names, values, strict=True))
                    where = f"{path}, row {number}"
                    yield Row(where, flatten(row))
                    number += 1

    def _batches(self, file: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
        """Yields a few thousand rows at a time, in types that records can hold."""
        names = self._stored.names
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
            yield batch.select(names).cast(self._stored)


def _names(name: str, kind: pa.DataType) -> Iterator[str]:
    if not pa.types.is_struct(kind):
        yield name
        return
    for field in kind:
        yield from _names(f"{name}.{field.name}", field.type)


def _is_list(kind: pa.DataType) -> bool:
    is_large = pa.types.is_large_list(kind)
    return is_large or pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_time(kind: pa.DataType) -> bool:
    return pa.types.is_temporal(kind) and not pa.types.is_interval(kind)


def _stored(kind: pa.DataType) -> pa.DataType:
    """Returns the type as which a column is read: integers for times, values for categories."""
    if pa.types.is_dictionary(kind):
        return _stored(kind.value_type)
    if _is_time(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_stored(field.type)) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_stored(kind.value_type), kind.list_size)
    if _is_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(_stored(kind.value_type))
    return kind


_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


def _notices(name: str, kind: pa.DataType) -> Iterator[str]:
    """Yields a sentence on each column that is stored as another type."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _notices(f"{name}.{field.name}", field.type)
    elif _is_list(kind):
        yield from _notices(name, kind.value_type)
    elif _is_time(kind):
        unit = "days" if pa.types.is_date32(kind) else _UNITS[getattr(kind, "unit", "ms")]
        since = ""
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            since = " since 1970-01-01" + " UTC" * bool(getattr(kind, "tz", None))
        yield f"Column {name!r} ({kind}) is stored as int64, {unit}{since}."
    elif pa.types.is_dictionary(kind):
        yield f"Column {name!r} (categories) is stored as its values, {kind.value_type}."


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
            f"those. Received: {kind}. Convert it, or leave it out (--drop {name})."
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
