"""Timelines whose every number is known: two ranks, of which rank 1 waits longer for its data."""

from pathlib import Path

from tfdml.timeline.rank_timeline import Clock, Kind, RankTimeline, Span

START = 1000.0  # On rank 0's clock.
STEP = 0.1
JOB = "host0, process 7, call 1"
ALL_REDUCE = {"operation": "all_reduce", "bytes": 4096, "ranks": None}

# Milliseconds since a step began, on rank 0's clock: of each rank its loop, then its exchanges.
LOOPS = (
    {Kind.DATA: (0, 1), Kind.COMPUTE: (1, 51), Kind.REST: (51, 71), Kind.UPDATE: (71, 80)},
    {Kind.DATA: (0, 11), Kind.COMPUTE: (11, 61), Kind.REST: (61, 71), Kind.UPDATE: (71, 80)},
)
EXCHANGES = (
    {"g/bucket_0": (20, 45), "g/bucket_1": (51, 71), "train_step/state/float32": (72, 75)},
    {"g/bucket_0": (30, 45), "g/bucket_1": (61, 71), "train_step/state/float32": (72, 75)},
)


def rank_timeline(
    rank: int, ahead: float = 0.0, steps: tuple[int, ...] = (4, 5), size: int = 2, job: str = JOB
) -> RankTimeline:
    """Returns a rank's timeline.

    Args:
        rank: The rank, 0 or 1.
        ahead: Seconds by which its clock is ahead of rank 0's.
        steps: Numbers of the batches.
        size: Number of ranks of the job.
        job: The job's text.
    """
    spans = []
    for number, step in enumerate(steps):
        begin = START + ahead + number * STEP

        def at(milliseconds: float, begin: float = begin) -> float:
            return begin + milliseconds / 1000

        for kind, (first, end) in LOOPS[rank].items():
            spans.append(Span(kind, "", at(first), at(end), step))
        for name, (first, end) in EXCHANGES[rank].items():
            spans.append(Span(Kind.EXCHANGE, name, at(first), at(end), step, ALL_REDUCE))
        spans.append(Span(Kind.CALLBACK, "Saver.on_train_batch_end", at(82), at(90)))
    clocks = [Clock(START + ahead + t, -ahead, 0.0004) for t in (-0.5, 0.5)]
    return RankTimeline(rank, size, f"host{rank}", job, "HorovodStrategy", clocks, spans)


def write(directory: Path) -> Path:
    """Writes the files of two ranks, whose clocks differ by 3 s; returns the directory."""
    for rank in range(2):
        rank_timeline(rank, 3.0 * rank).save(directory)
    return directory
