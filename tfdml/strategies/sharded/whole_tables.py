"""Tables that are dealt to the ranks, put together block by block."""

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdml.checkpointing.row_blocks import row_blocks
from tfdml.collectives.collective import Collective
from tfdml.optimizers.touched_rows import read_rows

# Bytes of a table that are gathered at a time.
BLOCK_BYTES = 64 << 20


def blocks_of(
    variable: keras.Variable, collective: Collective
) -> Iterator[tuple[slice, np.ndarray]]:
    """Gathers a table's rows in their order; all ranks call this, and go through all blocks.

    Args:
        variable: A table that is dealt to the ranks, or its slot.
        collective: Collective between the ranks.

    Yields:
        Indices of rows of the whole table, and the rows.
    """
    deal, ranks = variable.ownership.cut, collective.size
    own = getattr(variable.value, "values", [variable.value])[0]
    # The first rank has the most rows.
    for dealt in row_blocks((deal.rows(0), *deal.row_shape), own.dtype.size, BLOCK_BYTES // ranks):
        first = dealt.start
        counts = [max(0, min(dealt.stop, deal.rows(rank)) - first) for rank in range(ranks)]
        # Reading the whole variable would copy it.
        rows = read_rows(own, tf.range(first, first + counts[collective.rank]))
        gathered = collective.all_gather_rows(rows, counts, "table/rows").numpy()
        block = np.empty_like(gathered)
        for rank, part in enumerate(np.split(gathered, np.cumsum(counts)[:-1])):
            block[rank::ranks] = part
        begin = first * ranks
        yield slice(begin, begin + len(block)), block


def whole_table(variable: keras.Variable, collective: Collective) -> np.ndarray:
    """Returns all rows of a table; all ranks call this.

    Args:
        variable: A table that is dealt to the ranks, or its slot.
        collective: Collective between the ranks.
    """
    return np.concatenate([block for _, block in blocks_of(variable, collective)])
