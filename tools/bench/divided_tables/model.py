"""Model's sizes, batches and timing of `tools.bench.divided_tables`.

Neither TensorFlow nor typer is imported here: TorchRec's ranks have an environment without them.
"""

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from tools.bench.compression.model import Clock

TABLES, ROWS, WIDTH, DENSE = 8, 1_000_000, 64, 13
# Units of the layers below and above the tables.
BELOW, ABOVE = (128, WIDTH), (128, 1)
# Bounds of the tables' first values.
BOUND = 0.05
BATCH = 1024
WARM_UP, STEPS = 3, 12
RATE = 0.05
# Ids in a call of what `rows_per_second` times, and calls.
IDS, CALLS = 8192, 50


def batches(rows: int, ids_each: int) -> tuple[Any, Any, Any]:
    """Returns the ids of all samples, their numbers, and targets.

    Args:
        rows: The number of rows of each table.
        ids_each: The number of ids that a sample has for each table.

    Returns:
        Arrays int64 (samples, TABLES * ids_each), the ids of a table side by side; float32
        (samples, DENSE); float32 (samples, 1).
    """
    import numpy as np

    rng = np.random.default_rng(0)
    samples = (WARM_UP + STEPS) * BATCH
    ids = (rng.zipf(1.2, (samples, TABLES * ids_each)) * 7919) % rows
    dense = rng.normal(size=(samples, DENSE)).astype("float32")
    return ids.astype("int64"), dense, rng.integers(0, 2, (samples, 1)).astype("float32")


def measured(clock: Clock) -> dict[str, float]:
    """Returns the median step in seconds, the bytes sent in one, and this rank's peak in MiB."""
    seconds, _, sent = zip(*clock.rows[WARM_UP:], strict=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step": statistics.median(seconds), "sent": statistics.median(sent), "peak": peak}


def rows_per_second(rows: int, use: Callable[[Any], object]) -> float:
    """Returns how many rows a function uses in a second; median of some calls.

    Args:
        rows: The number of rows of a table. They are drawn evenly, so that few of them are in the
            processor's caches.
        use: The function. It is called with ids, an int64 array (IDS,).
    """
    import numpy as np

    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(CALLS):
        ids = rng.integers(0, rows, IDS)
        start = time.perf_counter()
        use(ids)
        seconds.append(time.perf_counter() - start)
    return IDS / statistics.median(seconds)


def gathered_per_second(rows: int) -> float:
    """Returns how many rows of a table NumPy copies in a second: the limit of the memory."""
    import numpy as np

    table = np.random.default_rng(0).random((rows, WIDTH), np.float32)
    copied = np.empty((IDS, WIDTH), np.float32)
    # With the default mode, NumPy copies twice.
    return rows_per_second(rows, lambda ids: np.take(table, ids, 0, copied, "clip"))
