"""Steps of a conversion, each of which any process can run, and run again.

If records keep their order, a step reads rows and writes their shard. Otherwise a first step reads
rows and writes their records to a file, sorted by shard; a second one merges one shard's records
from all those files. Memory holds the records of one step.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfdml.data.format import storage
from tfdml.data.format.framing import FRAME, Frames, cut
from tfdml.data.format.shard_writer import write_shard
from tfdml.data.sources.source import Source
from tfdml.data.write.encoding import encoded
from tfdml.data.write.plan import ConversionOptions, ConversionPlan
from tfdml.data.write.rejects import Rejects

_ENTRY = np.dtype([("target", "<i8"), ("position", "<i8"), ("offset", "<i8"), ("length", "<i8")])

# Number of collected records that are written at once.
_COLLECTED = 1024


class ConversionJob(NamedTuple):
    """A conversion; all its processes have a copy.

    Attributes:
        source: Input to convert.
        options: Options of the conversion.
        output: Directory of the shards.
        work: Local directory for notes and intermediate files.
    """

    source: Source
    options: ConversionOptions
    output: str
    work: str


@functools.lru_cache(maxsize=1)
def make_plan(job: ConversionJob) -> ConversionPlan:
    """Returns the job's plan, which is made once in each process."""
    return ConversionPlan(job.source, job.options)


def convert_range(
    job: ConversionJob, number: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Writes the shard of a range of rows; returns the note of the step."""
    plan, rejects = make_plan(job), Rejects(job.options)
    parts = (
        p.frames
        for p in encoded(job.source, job.options, plan, plan.ranges[number], rejects, progress)
    )
    shard = write_shard(job.output, plan.targets[number].name, parts)
    return {"shard": vars(shard), "rejects": rejects.rows}


def partition_range(
    job: ConversionJob, number: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Writes the records of a range of rows, sorted by shard; returns the note of the step."""
    plan, rejects = make_plan(job), Rejects(job.options)
    rows = plan.ranges[number]
    all_positions = plan.positions(rows)
    targets, positions, sizes = ([np.empty(0, np.int64)] for _ in range(3))
    frames: list[bytes] = []
    for part in encoded(job.source, job.options, plan, rows, rejects, progress):
        position = all_positions[part.ordinals - rows.begin]
        targets.append(plan.targets_of(part.ordinals, position, part.keys))
        positions.append(position)
        sizes.append(part.frames.lengths + FRAME)
        frames += cut(part.frames.data, sizes[-1])
    entries = np.empty(len(frames), _ENTRY)
    entries["target"], entries["position"], entries["length"] = map(
        np.concatenate, (targets, positions, sizes)
    )
    order = np.lexsort((entries["position"], entries["target"]))
    entries = entries[order]
    entries["offset"] = np.cumsum(entries["length"]) - entries["length"]
    with storage.writing(_partition_path(job, number)) as file:
        file.writelines([frames[i] for i in order.tolist()])
    with storage.writing(_partition_path(job, number) + ".npy") as file:
        np.save(file, entries)
    return {"rejects": rejects.rows}


def merge_target(
    job: ConversionJob, number: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Writes a shard from the files of all ranges; returns the note of the step."""
    plan = make_plan(job)
    positions, sizes = ([np.empty(0, np.int64)] for _ in range(2))
    frames: list[bytes] = []
    for i in range(len(plan.ranges)):
        entries = np.load(_partition_path(job, i) + ".npy", mmap_mode="r")
        begin, end = np.searchsorted(entries["target"], [number, number + 1])
        own = entries[begin:end]
        if len(own):
            length = int(own["length"].sum())
            data = storage.read_range(_partition_path(job, i), int(own["offset"][0]), length)
            positions.append(own["position"])
            sizes.append(own["length"])
            frames += cut(data, own["length"])
    order = np.argsort(np.concatenate(positions), kind="stable")
    lengths = np.concatenate(sizes) - FRAME
    parts = (
        Frames(b"".join([frames[i] for i in part.tolist()]), lengths[part])
        for part in (order[b : b + _COLLECTED] for b in range(0, len(order), _COLLECTED))
    )
    shard = write_shard(job.output, plan.targets[number].name, parts)
    progress(0)
    return {"shard": vars(shard), "rejects": []}


# Finished steps are noted in files of these names.
CONVERT, PARTITION, MERGE = "convert", "deal", "collect"
STEPS = {CONVERT: convert_range, PARTITION: partition_range, MERGE: merge_target}


def note(job: ConversionJob, step: str, number: int) -> Path:
    """Returns the path of the note that a step is done."""
    return Path(job.work, f"{step}-{number:06d}.json")


def has_notes(work: str) -> bool:
    """Returns whether a step of the conversion in a work directory is done."""
    return any(True for step in STEPS for _ in Path(work).glob(f"{step}-*.json"))


def run(
    job: ConversionJob, step: str, number: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Runs a step, unless it is done; returns its note."""
    noted = note(job, step, number)
    if noted.exists():
        return json.loads(noted.read_text())
    done = STEPS[step](job, number, progress)
    storage.write_bytes(str(noted), json.dumps(done).encode())
    return done


def _partition_path(job: ConversionJob, number: int) -> str:
    return os.path.join(job.work, f"dealt-{number:06d}")
