"""An epoch's numbers for its logs, the same on all ranks, from the times of each rank's steps."""

import math
from collections.abc import Sequence

import numpy as np

from tfdml.callbacks.performance.job_times import RankSums


def times_of_rank(rank: RankSums) -> dict[str, float]:
    """Returns the mean times of one rank's steps, in ms, by name; NaN if it has taken no step.

    Args:
        rank: The rank's sums.
    """
    steps, sums = rank.sums.steps, rank.sums
    return {
        f"{name}_ms": 1000 * getattr(sums, name) / steps if steps else math.nan
        for name in ("step", "compute", "exchange", "wait", "data_wait")
        if getattr(sums, name) is not None
    }


def times_of_job(ranks: Sequence[RankSums]) -> dict[str, float]:
    """Returns the mean times of a job's steps, its speed and its slowest rank, by name.

    Args:
        ranks: Each rank's sums, in rank order.
    """
    seconds = float(np.mean([rank.sums.step for rank in ranks]))
    rows = sum(rank.sums.rows for rank in ranks)
    numbers = {"samples_per_sec": rows / seconds if rows and seconds else math.nan}
    by_rank = [times_of_rank(rank) for rank in ranks]
    for name in by_rank[0]:
        # An asynchronous worker may have taken no step.
        values = [times[name] for times in by_rank if not math.isnan(times[name])] or [math.nan]
        numbers[name] = float(np.mean(values))
        # A step, and the exchange in it, take the same time on all ranks.
        if name not in ("step_ms", "exchange_ms"):
            numbers |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    if ranks[0].causes is None:
        slow = max(ranks, key=lambda rank: rank.sums.compute / max(rank.sums.steps, 1))
        return numbers | {"slowest_rank": float(slow.rank)}
    slow = max(ranks, key=lambda rank: rank.causes)
    return numbers | {"slowest_rank": float(slow.rank), "slowest_rank_share": slow.causes}
