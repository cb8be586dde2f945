"""Encoding of an input's rows as framed records: by columns if they are sound, else row by row.

Both ways make the same bytes. Only row by row can it report what is wrong with a row, and where.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tfdml.data.format import columns as by_column
from tfdml.data.format.framing import Frames, check_length, framed
from tfdml.data.format.values import encoder
from tfdml.data.sources.source import Chunk, Source
from tfdml.data.write.plan import ConversionOptions, ConversionPlan, Range
from tfdml.data.write.rejects import Rejects

# Maximum number of rows, and of their bytes, that are encoded at once.
_ROWS, _BYTES = 8192, 2 << 20


class Encoded(NamedTuple):
    """Records of consecutive rows, without those that were rejected.

    Attributes:
        ordinals: Numbers of the rows: int64, `[records]`.
        frames: Framed records of the rows.
        keys: Values of `split_key`; None without one.
    """

    ordinals: np.ndarray
    frames: Frames
    keys: list[Any] | None


def encoded(
    source: Source,
    options: ConversionOptions,
    plan: ConversionPlan,
    rows: Range,
    rejects: Rejects,
    progress: Callable[[int], None],
) -> Iterator[Encoded]:
    """Yields the records of a range of rows.

    Args:
        source: Input to convert.
        options: Options of the conversion.
        plan: Plan of the conversion.
        rows: Range of rows.
        rejects: Collection to which rows that cannot be converted are added.
        progress: Function called with the number of rows done since its last call.

    Raises:
        TooManyErrors: If a row that cannot be converted may not be skipped.
    """
    ordinal = rows.begin
    for chunk, begin, end in plan.chunks_of(rows):
        done = begin
        for part in _by_column(source, options, chunk, begin, end):
            records = len(part.frames.lengths)
            yield part._replace(ordinals=ordinal + part.ordinals)
            progress(records)
            done, ordinal = done + records, ordinal + records
        if done < end:
            yield from _by_row(source, options, chunk, done, end, ordinal, rejects, progress)
            ordinal += end - done


def _nonfinite(source: Source, options: ConversionOptions) -> bool | frozenset[str]:
    return options.allow_nonfinite or source.nonfinite


def _by_column(
    source: Source, options: ConversionOptions, chunk: Chunk, begin: int, end: int
) -> Iterator[Encoded]:
    """Yields the records of a chunk's rows from `begin`, as long as all of them are sound."""
    step = max(1, min(_ROWS, _BYTES * chunk.rows // max(1, chunk.bytes)))
    for columns in source.columns(chunk, begin, end):
        rows = len(next(iter(columns.values())))
        for first in range(0, rows, step):
            part = {name: column[first : first + step] for name, column in columns.items()}
            frames = by_column.encode(source.schema, part, _nonfinite(source, options))
            if frames is None:
                return
            keys = None
            if options.split_key:
                column = part[options.split_key]
                keys = column.tolist() if np.ndim(column) == 1 else list(column)
            yield Encoded(np.arange(len(frames.lengths)), frames, keys)


def _by_row(
    source: Source,
    options: ConversionOptions,
    chunk: Chunk,
    begin: int,
    end: int,
    ordinal: int,
    rejects: Rejects,
    progress: Callable[[int], None],
) -> Iterator[Encoded]:
    """Yields the records of rows that may not be sound, encoded one by one."""
    encode = encoder(source.schema, _nonfinite(source, options))
    key = options.split_key
    ordinals, records, keys, waiting, size = [], [], [], 0, 0

    def part() -> Encoded:
        return Encoded(np.array(ordinals, np.int64), framed(records), keys if key else None)

    for row in source.read(chunk, begin, end):
        if row.skipped:
            rejects.skip(row.where, row.reason)
        elif row.values is None:
            rejects.add(row.where, row.reason)
        else:
            try:
                record = encode(row.values)
                check_length(record)
            except ValueError as error:
                rejects.add(row.where, f"{error}{source.inferred_hint}")
            else:
                records.append(record)
                ordinals.append(ordinal)
                keys.append(row.values[key] if key else None)
                size += len(record)
        ordinal += 1
        waiting += 1
        if len(records) >= _ROWS or size >= _BYTES:
            yield part()
            progress(waiting)
            ordinals, records, keys, waiting, size = [], [], [], 0, 0
    if records:
        yield part()
    progress(waiting)
