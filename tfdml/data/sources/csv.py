"""CSV files: a header, and rows with as many cells as the header (RFC 4180)."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from tfdml.data import optional
from tfdml.data.format import storage
from tfdml.data.format.schema import FLOAT, INT64, STRING, Feature, Schema
from tfdml.data.sources.selected_columns import ColumnOptions
from tfdml.data.sources.source import Chunk, Row, sample_of
from tfdml.data.sources.text import SAMPLED_ROWS, UTF8_BOM, TextSource, ends_of_records, records

# A longer header means that the file has no line breaks.
_LONGEST_HEADER = 1 << 20
# Delimiters that are detected, and the number of lines that must agree.
_DELIMITERS, _LINES = (";", "\t", "|", ","), 100
_QUOTED = re.compile(rb'"[^"]*"')
# Content that pyarrow parses differently from `_parse`: quoted cells and hexadecimal numbers. Odd
# line ends show as a different number of rows.
_UNLIKE = (b'"', b"0x", b"0X")
_COLUMN_TYPES = {INT64: "int64", FLOAT: "float64", STRING: "string"}
csv.field_size_limit(1 << 30)


class CsvSource(TextSource):
    """CSV files with the same header.

    Args:
        paths: Paths of the files.
        schema: Schema of the columns; inferred from the first rows by default.
        delimiter: Character that separates cells; detected in the first rows by default.
        options: Columns to leave out, and rules for empty cells.

    Raises:
        ValueError: If a header names a column twice, the headers of files differ, or `schema` does
            not have their columns.
    """

    def __init__(
        self,
        paths: list[str],
        schema: Schema | None = None,
        delimiter: str | None = None,
        options: ColumnOptions | None = None,
    ):
        super().__init__(paths, quoted=True)
        self._options = options or ColumnOptions()
        self._delimiter = delimiter or self._detect_delimiter()
        self.settings = {"delimiter": self._delimiter}
        self._begins: dict[str, int] = {}
        headers = {path: self._read_header(path) for path in paths}
        self._columns = headers[paths[0]]
        for path, columns in headers.items():
            if columns != self._columns:
                raise ValueError(
                    f"All files must have one header. Received: {columns} in {path}, and "
                    f"{self._columns} in {paths[0]}."
                )
        self._options.check_names(self._columns)
        self.inferred = schema is None
        self.schema = self._infer() if schema is None else schema
        columns = {name for name in self._columns if not self._options.drops(name)}
        unknown = sorted(columns ^ {name for name in self.schema if not self._options.drops(name)})
        if unknown:
            raise ValueError(
                f"`schema` must have the columns of the header, {self._columns}. Received: "
                f"{sorted(self.schema)}; {unknown} differ."
            )
        self._prepare()

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in the header."""
        return self._columns

    def _prepare(self) -> None:
        self._converters = [
            _no_value
            if self._options.drops(name)
            else _converter(name, self.schema[name], self._options.names(name))
            for name in self._columns
        ]

    def _detect_delimiter(self) -> str:
        """Returns the delimiter of the first file.

        A comma, or a tab for `.tsv`, unless the header has none of them, and another delimiter is
        in all of the first lines equally often.
        """
        path = self._paths[0]
        usual = "\t" if path.endswith(".tsv") else ","
        head = storage.read_range(path, 0, _LONGEST_HEADER)
        lines = [_QUOTED.sub(b"", head[b:e]) for b, e in records(head, quoted=True)[:_LINES]]
        if not lines or usual.encode() in lines[0]:
            return usual
        for delimiter in _DELIMITERS:
            counts = {line.count(delimiter.encode()) for line in lines}
            if len(counts) == 1 and counts != {0}:
                self.notices += (
                    f"{path} is read with the delimiter {delimiter!r}; --delimiter sets another.",
                )
                return delimiter
        return usual

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_converters"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def _read_header(self, path: str) -> list[str]:
        head = storage.read_range(path, 0, _LONGEST_HEADER)
        ends = ends_of_records(head, quoted=True)
        end = int(ends[0]) if len(ends) else len(head)
        begin = len(UTF8_BOM) if head.startswith(UTF8_BOM) else 0
        try:
            columns = next(csv.reader([head[begin:end].decode()], delimiter=self._delimiter), [])
        except UnicodeDecodeError as error:
            raise ValueError(
                f"An input must be in UTF-8. Received: {path}, whose header is not."
            ) from error
        twice = sorted({c for c in columns if columns.count(c) > 1})
        if twice or not columns or "" in columns:
            raise ValueError(
                f"A header must name each column once. Received: {columns} in {path}"
                f"{f'; {twice} appear twice' if twice else ''}."
            )
        self._begins[path] = end
        return columns

    def _header(self, path: str) -> int:
        return self._begins[path]

    def _infer(self) -> Schema:
        self._converters = [lambda cell: cell] * len(self._columns)
        self.schema = Schema()
        rows = (row for chunk in self._first_chunks() for row in self.rows(chunk))
        sample = sample_of(itertools.islice(rows, SAMPLED_ROWS), self._paths)
        return Schema(
            {
                name: Feature(self._infer_kind(name, [row[name] for row in sample]))
                for name in self._columns
                if not self._options.drops(name)
            }
        )

    def _infer_kind(self, name: str, cells: list[str]) -> str:
        kind = _kind([cell for cell in cells if cell])
        if kind == STRING or "" not in cells or self._options.rule(name):
            return kind
        empty = cells.count("")
        self.notices += (
            f"Column {name!r} is stored as strings: {empty} of the first {len(cells)} cells are "
            f"empty, the others are numbers. To store numbers, say what an empty cell is: "
            f"--on-missing {name}=nan, {name}=default=VALUE or {name}=skip.",
        )
        return STRING

    def _first_chunks(self) -> Iterator[Any]:
        for path in self._paths:
            begin = self._begins[path]
            data = storage.read_range(path, begin, _LONGEST_HEADER)
            ends = ends_of_records(data, quoted=True)
            yield path, begin, int(ends[-1]) if len(ends) else len(data), 1

    def columns(self, chunk: Chunk, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields the cells of a chunk's rows, if all of them are plain and sound.

        Needs pyarrow, which is several times faster than `rows` and gives the same values.
        """
        pa, arrow = optional.find("pyarrow"), optional.find("pyarrow.csv")
        if arrow is None or any(
            f.kind not in _COLUMN_TYPES or f.shape or f.classes for f in self.schema.values()
        ):
            return
        # Here empty strings are values.
        if any(f.kind == STRING and self._options.names(n) for n, f in self.schema.items()):
            return
        path, offset, length, _ = chunk.key
        data = storage.read_range(path, offset, length)
        # Not by a regular expression, which takes several times as long.
        if any(part in data for part in _UNLIKE):
            return
        try:
            table = arrow.read_csv(
                pa.BufferReader(data),
                arrow.ReadOptions(
                    use_threads=False, block_size=len(data) + 1, column_names=self._columns
                ),
                arrow.ParseOptions(delimiter=self._delimiter, quote_char=False),
                arrow.ConvertOptions(
                    column_types={n: _COLUMN_TYPES[f.kind] for n, f in self.schema.items()},
                    null_values=[],
                ),
            )
        except pa.ArrowInvalid:
            return
        if table.num_rows == chunk.rows:
            part = table.slice(begin, end - begin)
            yield {name: part[name].to_numpy() for name in self._columns}

    def _parse(self, text: str, where: str, first: int) -> Iterator[Row]:
        columns, converters, width = self._columns, self._converters, len(self._columns)
        number = first
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter, strict=True)
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield Row(f"{where}, row {number}", None, f"is not CSV: {error}")
                number += 1
                continue
            if cells is None:
                return
            if not cells:
                continue
            if len(cells) != width:
                reason = f"must have {width} cells, as the header. Received: {len(cells)}"
                yield Row(f"{where}, row {number}", None, reason)
            else:
                try:
                    values = [c(cell) for c, cell in zip(converters, cells, strict=True)]
                    yield Row(f"{where}, row {number}", dict(zip(columns, values, strict=True)))
                except ValueError as error:
                    reason = f"{error}{self.inferred_hint}"
                    yield Row(f"{where}, row {number}", None, reason)
            number += 1


def _kind(cells: list[str]) -> str:
    """Returns the kind that fits all cells of a column; numbers with a leading zero are strings."""
    if not cells or any(len(c) > 1 and c[0] == "0" and c.isdecimal() for c in cells):
        return STRING
    for kind, convert in ((INT64, _to_int), (FLOAT, _to_float)):
        try:
            for cell in cells:
                convert(cell)
        except ValueError:
            continue
        return kind
    return STRING


def _to_int(cell: str) -> int:
    if "_" in cell:
        raise ValueError
    return int(cell)


def _to_float(cell: str) -> float:
    if "_" in cell:
        raise ValueError
    return float(cell)


def _no_value(cell: str) -> None:
    return None


def _converter(name: str, feature: Feature, empty_is_missing: bool) -> Callable[[str], Any]:
    """Returns a function that converts a cell to a value; None stands for no value."""
    if feature.kind == INT64 and feature.classes:
        numbers = {c: i for i, c in enumerate(feature.classes)}
        return lambda cell: numbers[cell] if cell in numbers else _to_int(cell) if cell else None
    convert = {INT64: _to_int, FLOAT: _to_float}.get(feature.kind)
    if convert is None:
        return (lambda cell: cell or None) if empty_is_missing else (lambda cell: cell)

    def checked(cell: str) -> Any:
        try:
            return convert(cell) if cell else None
        except ValueError as error:
            raise ValueError(f"{name!r} must be {feature.kind}. Received: {cell!r}") from error

    return checked
