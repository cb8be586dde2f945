"""Base class of inputs, whose rows have an order that is known before any row is read."""

import abc
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdml.data.format.schema import Schema


class Row(NamedTuple):
    """One row of an input.

    Attributes:
        where: File and position in the file, for error messages.
        values: Values by feature; None if the row cannot be read.
        reason: Reason why the row cannot be read.
    """

    where: str
    values: dict[str, Any] | None
    reason: str = ""


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


class Source(abc.ABC):
    """Input whose rows have an order, so that any process can read any part of it.

    Sources are picklable: each process of a conversion has a copy.

    Attributes:
        schema: Schema of the rows.
        folder: Directory that is read; None if the input is not a directory.
    """

    schema: Schema
    folder: str | None = None

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
