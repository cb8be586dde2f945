"""Base class of inputs, whose rows have an order that is known before any row is read."""

import abc
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfdml.data.format.schema import Schema


class Row(NamedTuple):
    """One row of an input.

    Attributes:
        where: File and position in the file, for error messages.
        values: Values by feature; None if the row cannot be read.
        reason: Reason why the row cannot be read.
        skipped: Whether the options of the input ask to leave the row out.
    """

    where: str
    values: dict[str, Any] | None
    reason: str = ""
    skipped: bool = False


class Chunk(NamedTuple):
    """Consecutive rows that are read together.

    Attributes:
        key: Key by which the source finds the rows; picklable.
        rows: Number of rows.
        bytes: Approximate size of the rows as records, in bytes.
    """

    key: Any
    rows: int
    bytes: int


def sample_of(rows: Iterable[Row], paths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the values of the first rows of an input, without rows that cannot be read.

    Args:
        rows: First rows.
        paths: Paths of the files, for the message.

    Raises:
        ValueError: If there are no rows, or none of them can be read.
    """
    sample, refused = [], []
    for row in rows:
        if row.values is None:
            refused.append(row)
        else:
            sample.append(row.values)
    if sample:
        return sample
    if refused:
        raise ValueError(
            f"An input must have rows that can be read. Received: {', '.join(paths)}, whose first "
            f"{len(refused)} rows are all refused. {refused[0].where}: {refused[0].reason}."
        )
    raise ValueError(f"An input must have rows. Received: none in {', '.join(paths)}.")


class Source(abc.ABC):
    """Input whose rows have an order, so that any process can read any part of it.

    Sources are picklable: each process of a conversion has a copy.

    Attributes:
        schema: Schema of the rows.
        folder: Directory that is read; None if the input is not a directory.
        inferred: Whether the types of the columns were inferred from the first rows.
        nonfinite: Features that may hold NaN and infinity, whatever the conversion's options.
        notices: Sentences that users should read before they use the result.
        settings: JSON-serialisable options by which rows become records.
    """

    schema: Schema
    folder: str | None = None
    inferred: bool = False
    nonfinite: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()
    settings: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def inferred_hint(self) -> str:
        """Second half of the reason for rows whose values do not fit; empty for a given schema."""
        hint = "; types are inferred from the first rows, and --schema gives others"
        return hint if self.inferred else ""

    @property
    def kind(self) -> str:
        """Name of the kind of input."""
        return type(self).__name__.removesuffix("Source").lower()

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, those that no record can hold included."""
        return list(self.schema)

    @property
    @abc.abstractmethod
    def files(self) -> list[str]:
        """Paths of the files that are read."""

    @abc.abstractmethod
    def chunks(self) -> list[Chunk]:
        """Returns the chunks of the input, in order."""

    @abc.abstractmethod
    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a chunk, including those that cannot be read."""

    def columns(self, chunk: Chunk, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields the values of rows `begin` to `end` (exclusive) by feature, many rows at once.

        Only sources for which this is much faster than row by row implement it, and only for sound
        rows: it ends before the first rows that are not sound or cannot be checked.
        """
        return iter(())

    def read(self, chunk: Chunk, begin: int, end: int) -> Iterator[Row]:
        """Yields rows `begin` to `end` (exclusive) of a chunk.

        Raises:
            ValueError: If the chunk has fewer rows than planned.
        """
        count = begin
        for row in itertools.islice(self.rows(chunk.key), begin, end):
            count += 1
            yield row
        if count != end:
            raise ValueError(
                f"The input must be as it was when the conversion began. Received: {count} rows "
                f"instead of {end} in {chunk.key}."
            )
