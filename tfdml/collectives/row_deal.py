"""Division of a table's rows among the ranks in turn."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class RowDeal:
    """Division of a table among the ranks: row i belongs to rank i modulo the number of ranks.

    So frequent rows, which often have neighbouring numbers, are spread over all ranks.

    Attributes:
        shape: The table's shape.
        ranks: The number of ranks.
    """

    shape: tuple[int, ...]
    ranks: int
    # No rank owns the whole table; see `Cut.owner`.
    owner: None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[1:]

    def rows(self, rank: int) -> int:
        """Returns the number of rows that a rank owns."""
        return len(range(rank, self.shape[0], self.ranks))

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the part that a rank owns."""
        return (self.rows(rank), *self.row_shape)

    def part_of(self, value: Any, rank: int) -> Any:
        """Returns a rank's part of a tensor or array of the table's shape."""
        return value[rank :: self.ranks]

    def of_rows(self) -> "RowDeal":
        """Returns the division of a number for each row."""
        return dataclasses.replace(self, shape=self.shape[:1])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole table.

        Args:
            parts: The parts of all ranks, of any shape. Their number may be another than `ranks`:
                that of the job which dealt the rows.
        """
        whole = np.empty(self.shape, parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[rank :: len(parts)] = part.reshape(-1, *self.row_shape)
        return whole
