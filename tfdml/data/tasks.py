"""The steps of a conversion, each of which any process can do, and do again.

Where records keep their order, a step reads rows and writes their shard. Else a first step reads
rows and deals their records into a file, in the order of their shards; a second one collects one
shard's records out of all those files. Memory holds the records of one step.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfdml.data import storage
from tfdml.data.plan import Options, Plan, Range
from tfdml.data.sources.source import Source
from tfdml.data.writer import write_shard

_ENTRY = np.dtype([("target", "<i8"), ("place", "<i8"), ("offset", "<i8"), ("length", "<i8")])
# How many rows are reported as done at once.
_REPORTED = 1000


class TooManyErrors(ValueError):
    """A row that could not be converted, where none or no more may be skipped."""


class Job(NamedTuple):
    """What all processes of a conversion have a copy of.

    Attributes:
        source: The input.
        options: What is asked for.
        output: Where the shards go.
        work: A local directory for what is noted on the way.
    """

    source: Source
    options: Options
    output: str
    work: str


@functools.lru_cache(maxsize=1)
def plan_of(job: Job) -> Plan:
    """Returns the job's plan; made once in each process."""
    return Plan(job.source, job.options)


class Rejects:
    """Rows that could not be converted.

    Args:
        options: Whether they are skipped, and how many.
    """

    def __init__(self, options: Options):
        self._options = options
        self.rows: list[dict[str, str]] = []

    def add(self, where: str, reason: str) -> None:
        """Notes a row.

        Raises:
            TooManyErrors: If it may not be skipped.
        """
        if self._options.on_error == "strict":
            raise TooManyErrors(
                f"{where}: {reason}. Mend it, or skip such rows by --on-error skip."
            )
        self.rows.append({"where": where, "reason": reason})
        check_errors(self._options, len(self.rows), self.rows[-1])


def check_errors(options: Options, count: int, last: dict[str, str]) -> None:
    """Raises `TooManyErrors` if `count` rows may not be skipped."""
    if options.max_errors is not None and count > options.max_errors:
        raise TooManyErrors(
            f"At most {options.max_errors} rows may be skipped (--max-errors). Received: {count}, "
            f"of which one is {last['where']}: {last['reason']}."
        )


def convert_range(job: Job, number: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Writes the shard of a range of rows; returns what is noted of it."""
    plan, rejects = plan_of(job), Rejects(job.options)
    records = (r for _, r, _ in _encoded(job, plan.ranges[number], rejects, progress))
    shard = write_shard(job.output, plan.targets[number].name, records)
    return {"shard": vars(shard), "rejects": rejects.rows}


def deal_range(job: Job, number: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Deals the records of a range of rows into a file; returns what is noted of it."""
    plan, rejects, rows = plan_of(job), Rejects(job.options), plan_of(job).ranges[number]
    places = plan.places(rows).tolist()
    found = []
    for ordinal, record, key in _encoded(job, rows, rejects, progress):
        place = places[ordinal - rows.begin]
        found.append((plan.target_of(ordinal, place, key), place, record))
    found.sort(key=lambda entry: entry[:2])
    entries = np.empty(len(found), _ENTRY)
    offset = 0
    with storage.writing(_dealt(job, number)) as file:
        for i, (target, place, record) in enumerate(found):
            entries[i] = (target, place, offset, len(record))
            file.write(record)
            offset += len(record)
    with storage.writing(_dealt(job, number) + ".npy") as file:
        np.save(file, entries)
    return {"rejects": rejects.rows}


def collect_target(job: Job, number: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Writes a shard of the records that were dealt to it; returns what is noted of it."""
    plan = plan_of(job)
    found: list[tuple[int, bytes]] = []
    for i in range(len(plan.ranges)):
        entries = np.load(_dealt(job, i) + ".npy", mmap_mode="r")
        begin, end = np.searchsorted(entries["target"], [number, number + 1])
        if begin == end:
            continue
        own = entries[begin:end]
        first = int(own["offset"][0])
        size = int(own["offset"][-1] + own["length"][-1]) - first
        data = storage.read_range(_dealt(job, i), first, size)
        ends = (own["offset"] + own["length"] - first).tolist()
        begins = (own["offset"] - first).tolist()
        for place, b, e in zip(own["place"].tolist(), begins, ends, strict=True):
            found.append((place, data[b:e]))
    found.sort(key=lambda entry: entry[0])
    shard = write_shard(job.output, plan.targets[number].name, (record for _, record in found))
    progress(0)
    return {"shard": vars(shard), "rejects": []}


STEPS = {"convert": convert_range, "deal": deal_range, "collect": collect_target}


def note(job: Job, step: str, number: int) -> Path:
    """Returns where it is noted that a step is done."""
    return Path(job.work, f"{step}-{number:06d}.json")


def run(job: Job, step: str, number: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Does a step, unless it is done; returns what is noted of it."""
    noted = note(job, step, number)
    if noted.exists():
        return json.loads(noted.read_text())
    done = STEPS[step](job, number, progress)
    storage.write_bytes(str(noted), json.dumps(done).encode())
    return done


def _dealt(job: Job, number: int) -> str:
    return os.path.join(job.work, f"dealt-{number:06d}")


def _encoded(
    job: Job, rows: Range, rejects: Rejects, progress: Callable[[int], None]
) -> Iterator[tuple[int, bytes, Any]]:
    """Yields the numbers of rows, their records, and the values of the split's key."""
    encode = job.source.schema.encoder(job.options.allow_nonfinite)
    key = job.options.split_key
    ordinal = rows.begin
    waiting = 0
    for chunk, begin, end in plan_of(job).chunks_of(rows):
        for row in job.source.read(chunk, begin, end):
            if row.values is None:
                rejects.add(row.where, row.reason)
            else:
                try:
                    record = encode(row.values)
                except ValueError as error:
                    rejects.add(row.where, str(error))
                else:
                    yield ordinal, record, row.values[key] if key else None
            ordinal += 1
            waiting += 1
            if waiting == _REPORTED:
                progress(waiting)
                waiting = 0
    progress(waiting)
