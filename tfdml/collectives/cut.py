"""Division of variables' numbers among the ranks: which rank owns which rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Parts begin at multiples of so many numbers, which no processor's vectors exceed: then each number
# of a part is computed by the same instructions as in the whole, and has the same bits.
_UNIT = 16
# A variable is cut between its rows if each rank gets at least so many units of them, so that
# ranks differ by less than an eighth. Otherwise it is cut between any two units.
_UNITS_PER_RANK = 8


@dataclasses.dataclass(frozen=True)
class Cut:
    """Division of a variable among the ranks, each of which owns consecutive rows.

    Attributes:
        shape: The variable's shape.
        row_shape: Shape of a row: the variable's without its first axis, or `()` if the rows are
            single numbers.
        bounds: The first row of each rank, then the number of rows: `[ranks + 1]` ints.
    """

    shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.bounds) - 1

    @property
    def owner(self) -> int | None:
        """The rank that owns all rows; None if several own some."""
        owners = [rank for rank in range(self.ranks) if self.rows(rank)]
        return owners[0] if len(owners) == 1 else None

    def rows(self, rank: int) -> int:
        """Returns the number of rows that a rank owns."""
        return self.bounds[rank + 1] - self.bounds[rank]

    @property
    def sizes(self) -> list[int]:
        """The number of numbers that each rank owns."""
        return [self.rows(rank) * math.prod(self.row_shape) for rank in range(self.ranks)]

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the part that a rank owns."""
        return (self.rows(rank), *self.row_shape)

    def part_of(self, value: Any, rank: int) -> Any:
        """Returns a rank's part of a tensor or array of the variable's shape."""
        rows = value.reshape if hasattr(value, "reshape") else lambda s: tf.reshape(value, s)
        return rows((self.bounds[-1], *self.row_shape))[self.bounds[rank] : self.bounds[rank + 1]]

    def of_rows(self) -> "Cut":
        """Returns the division of a number for each row."""
        return dataclasses.replace(self, shape=self.shape[:1], row_shape=())


def cut_in_rows(shape: Sequence[int], ranks: int, multiple: int = _UNIT) -> Cut | None:
    """Cuts a variable into parts of about equal size; returns None if it is too small.

    Args:
        shape: The variable's shape.
        ranks: The number of ranks.
        multiple: Parts begin at multiples of so many numbers: 16, or a multiple of that.
    """
    shape, numbers = tuple(shape), math.prod(shape)
    if numbers < multiple * ranks:
        return None
    row_shape = shape[1:]
    unit = multiple // math.gcd(math.prod(row_shape), multiple)
    rows = shape[0]
    if rows < _UNITS_PER_RANK * ranks * unit:
        row_shape, unit, rows = (), multiple, numbers
    units = -(-rows // unit)
    bounds = [min(rows, rank * units // ranks * unit) for rank in range(ranks)]
    return Cut(shape, row_shape, (*bounds, rows))


def own_whole(shapes: Sequence[Sequence[int]], ranks: int) -> list[Cut | None]:
    """Gives each variable to one rank, so that all ranks own about the same number of numbers.

    The smallest one is given to none (None): all ranks update it, so none is ever without an
    update.

    Args:
        shapes: The variables' shapes.
        ranks: The number of ranks.
    """
    cuts: list[Cut | None] = [None] * len(shapes)
    owned = [0] * ranks
    by_size = sorted(range(len(shapes)), key=lambda i: (-math.prod(shapes[i]), i))
    for index in by_size[:-1]:
        shape = tuple(shapes[index])
        if shape:
            rank = owned.index(min(owned))
            owned[rank] += math.prod(shape)
            bounds = tuple(shape[0] * (r > rank) for r in range(ranks + 1))
            cuts[index] = Cut(shape, shape[1:], bounds)
    return cuts
