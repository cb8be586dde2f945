"""What all inputs have in common: an order of rows that is known before any is read."""

import abc
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdml.data.schema import Schema


class Row(NamedTuple):
    """One row of an input.

    Attributes:
        where: What errors call it: the file, and the place within it.
        values: Its values by feature; None if it cannot be read.
        reason: Why it cannot be read.
    """

    where: str
    values: dict[str, Any] | None
    reason: str = ""


class Chunk(NamedTuple):
    """Consecutive rows that are read together.

    Attributes:
        key: What the source finds them by; picklable.
        rows: Their number.
        bytes: About how many bytes they take as records.
    """

    key: Any
    rows: int
    bytes: int


class Source(abc.ABC):
    """An input whose rows have an order, so that any process can read any part of it.

    Sources are picklable: each process of a conversion has a copy.

    Attributes:
        schema: What the rows hold.
        folder: The directory that is read, where one is.
    """

    schema: Schema
    folder: str | None = None

    @property
    @abc.abstractmethod
    def files(self) -> list[str]:
        """The files that are read."""

    @abc.abstractmethod
    def chunks(self) -> list[Chunk]:
        """Returns the parts of the input, in its order."""

    @abc.abstractmethod
    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a chunk; each is there, even where it cannot be read."""

    def columns(self, chunk: Chunk, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields the values of rows from `begin` to before `end` by feature, many rows at once.

        Only where that is much faster than row by row, and only sound rows: it ends before the
        first ones that are not, or that it cannot say it of.
        """
        return iter(())

    def read(self, chunk: Chunk, begin: int, end: int) -> Iterator[Row]:
        """Yields the rows of a chunk from `begin` to before `end`.

        Raises:
            ValueError: If the chunk has not as many rows as it was planned with.
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
