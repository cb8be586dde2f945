"""Causes of other rows in a batch: data that depend on the run, the rank or the number of ranks.

Each function returns the cause that it recognises, or None.
"""

from collections.abc import Callable

import numpy as np

from tfdml.verification.evidence import Cause, Evidence


def _drawn(found: Evidence) -> Cause | None:
    if found.drawn is None:
        return None
    if "shuffle" in found.drawn:
        return Cause(
            "shuffle",
            f"{found.drawn} draws another order in each run, so the runs do not train on the same "
            f"batches.",
            "Pass `seed=` to `Dataset.shuffle`, or call `keras.utils.set_random_seed(...)` with "
            "the same number on all ranks before the dataset is made.",
        )
    return Cause(
        "augmentation",
        f"The pipeline draws random numbers that differ in each run: {found.drawn}.",
        "Use stateless random operations whose seed comes from the data, such as "
        "`tf.image.stateless_random_flip_left_right`, or seed the operation.",
    )


def _unseeded_data(found: Evidence) -> Cause | None:
    if found.repeats:
        return None
    adapter = found.comparison.one.facts.get("data", {}).get("adapter", "")
    return Cause(
        "unseeded data",
        f"One process reads other rows each time the script runs (data of {adapter}).",
        "Seed what draws random numbers where the data are made: NumPy's generator, Python's, or "
        "all by `keras.utils.set_random_seed(...)`.",
    )


def _batch_by_size(found: Evidence) -> Cause | None:
    one, several = found.comparison.one, found.comparison.several
    step, replicas = found.first.key[0], found.number_of_replicas
    rows = len(one.rows(step))
    if len(several.rows(step)) != replicas * rows:
        return None
    return Cause(
        "batch multiplied by size",
        f"The batch has {replicas * rows} rows on {replicas} replicas, and {rows} on one: batches "
        f"are global, and the strategy splits them.",
        "Pass the global batch size without multiplying it by the number of processes.",
    )


def _same_rows_on_ranks(found: Evidence) -> Cause | None:
    rows = found.comparison.several.digests(found.first.key[0])
    if len(rows) < 2:
        return None
    repeated = len(np.unique(np.concatenate(rows))) < sum(len(np.unique(r)) for r in rows)
    once = found.comparison.one.rows(found.first.key[0])
    if not repeated or len(np.unique(once)) < len(once):
        return None
    return Cause(
        "same rows on several ranks",
        "Several ranks train on the same rows: each reads the data from the beginning.",
        "Give each rank its own part of the data with AutoShardPolicy.OFF, or leave the policy "
        "out: then the strategy splits each global batch.",
    )


def _uneven_data(found: Evidence) -> Cause | None:
    rows = [len(d) for d in found.comparison.several.digests(found.first.key[0])]
    if not rows or max(rows) - min(rows) <= 1:
        return None
    return Cause(
        "uneven data",
        f"Ranks have different numbers of rows: the replicas have {', '.join(map(str, rows))} rows "
        f"of this batch. No row is lost, but the batches are not those of one process.",
        "Deal the rows in turn, `shard(size, rank)`, so that parts differ by one row at most; or "
        "give all ranks the same data without AutoShardPolicy.OFF: the strategy splits each batch.",
    )


def _data_by_rank(found: Evidence) -> Cause:
    ranks = ", ".join(map(str, found.first.replicas)) or "several replicas"
    return Cause(
        "data by rank",
        f"The rows depend on the rank or on the number of processes: the global batch has others "
        f"than on one process, on replicas {ranks}. A seed, a shard or a file list that depends on "
        f"the rank does this.",
        "Give all ranks the same data in the same order: the strategy splits each batch. If each "
        "rank must read a part of its own, deal the rows in turn: `shard(size, rank)`.",
    )


ROW_CAUSES: tuple[Callable[[Evidence], Cause | None], ...] = (
    _drawn,
    _unseeded_data,
    _batch_by_size,
    _same_rows_on_ranks,
    _uneven_data,
    _data_by_rank,
)
