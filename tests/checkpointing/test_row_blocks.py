"""Checks the blocks of rows by which tables are written and read."""

import pytest

from tfdml.checkpointing.row_blocks import row_blocks


@pytest.mark.parametrize(
    ("shape", "block_bytes", "rows"),
    [
        ((10, 3), 48, [4, 4, 2]),
        ((10, 3), 59, [4, 4, 2]),
        ((8, 3), 48, [4, 4]),
        ((3, 3), 5, [1, 1, 1]),  # A row is larger than a block.
        ((7,), 8, [2, 2, 2, 1]),
        ((0, 3), 48, []),
        ((5, 0), 48, [5]),  # Rows without numbers.
    ],
)
def test_blocks_have_all_rows_in_their_order(shape, block_bytes, rows):
    blocks = list(row_blocks(shape, 4, block_bytes))
    assert [b.stop - b.start for b in blocks] == rows
    assert [row for b in blocks for row in range(b.start, b.stop)] == list(range(shape[0]))
