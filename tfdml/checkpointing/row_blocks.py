"""Blocks of a table's rows, by which files are written and read: no process has the whole table."""

import math
from collections.abc import Iterator, Sequence

BLOCK_BYTES = 4 << 20


def row_blocks(
    shape: Sequence[int], itemsize: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[slice]:
    """Yields the indices of a table's rows, block by block.

    Args:
        shape: Shape of the table.
        itemsize: Size of a number in bytes.
        block_bytes: Largest size of a block in bytes, unless a row is larger.
    """
    row_bytes = itemsize * math.prod(shape[1:])
    step = max(1, block_bytes // max(1, row_bytes))
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))
