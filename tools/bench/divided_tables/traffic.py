"""Bytes that rank 0 has to send in a step of `tools.bench.divided_tables`, counted from the ids.

They are those of ids, rows, their gradients, and the layers' gradients. What the network adds,
and what ranks tell each other besides, is not among them. A rank has the same part of each global
batch, in the order of the ranks.
"""

from typing import Any

from tools.bench.divided_tables.model import ABOVE, BELOW, DENSE, TABLES, WIDTH

# Bytes of a row on the way, by the value of `Sharding(row_codec=...)`.
ROW_BYTES = {None: 4 * WIDTH, "bfloat16": 2 * WIDTH, "int8": WIDTH + 4}
# Bytes of an id between tfdml's ranks, and of all others.
_ID, _LONG_ID = 4, 8
# Bytes of the number of a sample's ids for a table, which TorchRec sends.
_LENGTH = 4


def divided(ids: Any, rows: int, ranks: int, row_codec: str | None = None) -> float:
    """Returns the bytes if row i of each table is on rank i modulo `ranks`.

    The rank sends its ids, each once, to their owners, their gradients the same way, and the rows
    that others ask it for.

    Args:
        ids: Ids of a global batch, shape `(samples, TABLES * k)`.
        rows: The number of rows of each table.
        ranks: The number of ranks.
        row_codec: Encoding of rows and gradients.
    """
    import numpy as np

    del rows
    wanted = sum(np.count_nonzero(own % ranks) for own in _unique(ids, ranks, 0))
    asked = sum(
        np.count_nonzero(own % ranks == 0)
        for other in range(1, ranks)
        for own in _unique(ids, ranks, other)
    )
    return wanted * _ID + (wanted + asked) * ROW_BYTES[row_codec] + _layers(ranks)


def whole(ids: Any, rows: int, ranks: int) -> float:
    """Returns the bytes if each rank sends the gradients of its rows, each once, to all others.

    Args:
        ids: As in `divided`.
        rows: As in `divided`.
        ranks: As in `divided`.
    """
    del rows
    gradients = sum(len(own) for own in _unique(ids, ranks, 0))
    return (ranks - 1) * gradients * (_LONG_ID + ROW_BYTES[None]) + _layers(ranks)


def loop(ids: Any, rows: int, ranks: int) -> float:
    """Returns the bytes if each rank sends a gradient for each id, also for equal ones.

    Args:
        ids: As in `divided`.
        rows: As in `divided`.
        ranks: As in `divided`.
    """
    del rows
    gradients = ids.size // ranks
    return (ranks - 1) * gradients * (_LONG_ID + ROW_BYTES[None]) + _layers(ranks)


def torchrec_by_rows(ids: Any, rows: int, ranks: int) -> float:
    """Returns the bytes if each rank has consecutive rows of each table, and adds them up.

    The rank sends each id to its owner, its parts of the sums to the ranks of the samples
    (reduce-scatter), and the gradients of its own samples' sums to all others.

    Args:
        ids: As in `divided`.
        rows: As in `divided`.
        ranks: As in `divided`.
    """
    import numpy as np

    samples = len(ids) // ranks
    to_others = np.count_nonzero(ids[:samples] // -(-rows // ranks))
    sums = (ranks - 1) * samples * TABLES
    return to_others * _LONG_ID + sums * (_LENGTH + 2 * ROW_BYTES[None]) + _layers(ranks)


def torchrec_by_tables(ids: Any, rows: int, ranks: int) -> float:
    """Returns the bytes if each rank has some of the tables, and adds up their rows.

    The rank sends each id, and the gradient of each sum, to the table's owner, and the sums of its
    own tables to the ranks of the samples.

    Args:
        ids: As in `divided`.
        rows: As in `divided`.
        ranks: As in `divided`.
    """
    del rows
    samples, ids_each = len(ids) // ranks, ids.shape[1] // TABLES
    own = sum(table * ranks // TABLES == 0 for table in range(TABLES))
    asked = samples * (TABLES - own) * (ids_each * _LONG_ID + _LENGTH + ROW_BYTES[None])
    return asked + (ranks - 1) * samples * own * ROW_BYTES[None] + _layers(ranks)


def _unique(ids: Any, ranks: int, rank: int) -> list[Any]:
    """Returns the ids that a rank looks up in each table, each once."""
    import numpy as np

    samples = len(ids) // ranks
    own = ids[rank * samples : (rank + 1) * samples].reshape(samples, TABLES, -1)
    return [np.unique(own[:, table]) for table in range(TABLES)]


def _layers(ranks: int) -> float:
    """Returns the bytes of the sum of the layers' gradients over all ranks, as in a ring."""
    units = [(DENSE, *BELOW), (WIDTH + (TABLES + 1) ** 2, *ABOVE)]
    numbers = sum((n + 1) * m for each in units for n, m in zip(each, each[1:], strict=False))
    return 2 * (ranks - 1) / ranks * 4 * numbers
