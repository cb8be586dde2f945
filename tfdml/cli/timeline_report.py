"""The tables of `tfdml timeline`, and the trace and the picture that it writes."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tfdml.timeline.chrome_trace import chrome_trace
from tfdml.timeline.findings import Findings, find
from tfdml.timeline.job_timeline import JobTimeline, Wait
from tfdml.timeline.picture import draw
from tfdml.timeline.rank_timeline import Kind, short_name


def show(directory: Path, output: Path, picture: Path | None, longest: int) -> None:
    """Writes the merged trace, and prints what it tells.

    Args:
        directory: Directory with the ranks' files.
        output: File for the trace.
        picture: File for the picture of a step; None for no picture.
        longest: Number of waits and gaps that are shown.

    Raises:
        ValueError: If the files are not those of all ranks of a job.
        ImportError: If Matplotlib is missing.
    """
    job = JobTimeline.load(directory)
    found = find(job)
    output.write_text(json.dumps(chrome_trace(job)), encoding="utf-8")
    console = Console(highlight=False)
    console.print(_about(job, found))
    console.print(_times(found))
    console.print(_exchange(found))
    _print_waits(console, job, found, longest)
    _print_gaps(console, found, longest)
    console.print(f"\nTrace for https://ui.perfetto.dev or chrome://tracing: {output}")
    if picture is not None:
        step = typical_step(job)
        draw(job, step, picture)
        console.print(f"Picture of batch {step}: {picture}")


def typical_step(job: JobTimeline) -> int:
    """Returns the batch whose step on rank 0 took the median time.

    Args:
        job: The timelines of all ranks on one clock.
    """
    seconds: dict[int, float] = {}
    for span in job.ranks[0].spans:
        if span.kind in (Kind.COMPUTE, Kind.REST, Kind.UPDATE):
            seconds[span.step] = seconds.get(span.step, 0.0) + span.seconds
    return min(seconds, key=lambda step: abs(seconds[step] - statistics.median(seconds.values())))


def _about(job: JobTimeline, found: Findings) -> str:
    steps = found.steps
    batches = f"batch {steps[0]}" if len(steps) == 1 else f"batches {steps[0]} to {steps[-1]}"
    first = job.ranks[0]
    text = f"{first.strategy} on {len(job.ranks)} ranks, {batches}."
    if not all(timeline.clocks for timeline in job.ranks):
        return f"{text} Clocks could not be compared: times of different ranks may be shifted."
    return f"{text} Clocks are aligned to within {_ms(job.error, 3)} ms."


def _times(found: Findings) -> Table:
    caption = (
        "data: waiting for a batch; compute: until the last gradient; rest: of the exchange after "
        "that; between: callbacks, saves and evaluation"
    )
    rows = [
        (r.rank, r.host, r.step, r.data, r.compute, r.rest, r.update, r.between)
        for r in found.ranks
    ]
    names = ("rank", "host", "step", "data", "compute", "rest", "update", "between")
    return _table("Mean times of a step, in ms", names, rows, caption)


def _exchange(found: Findings) -> Table:
    caption = (
        "wire: exchanging, once all ranks took part; overlap: the part of it that computing hid; "
        "waited: for ranks that did not take part yet; gaps: nothing on the wire"
    )
    rows = [
        (r.rank, r.host, r.wire, "" if r.overlap is None else f"{r.overlap:.0%}", r.waited, r.idle)
        for r in found.ranks
    ]
    names = ("rank", "host", "wire", "overlap", "waited", "gaps")
    return _table("Mean exchange of a step, in ms", names, rows, caption)


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence], caption: str = "") -> Table:
    """Returns a table; numbers of seconds are shown in milliseconds."""
    table = Table(title=title, caption=caption or None, caption_justify="left")
    for number, name in enumerate(names):
        texts = any(isinstance(row[number], str) for row in rows) and name != "overlap"
        table.add_column(name, justify="left" if texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_ms(c) if isinstance(c, float) else str(c) for c in row))
    return table


def _print_waits(console: Console, job: JobTimeline, found: Findings, longest: int) -> None:
    if not found.waits:
        console.print("\nNo rank waited for another.")
        return
    # Of exchanges of a step that wait together, the first to begin waits longest.
    first: dict[tuple, Wait] = {}
    for wait in found.waits:
        first.setdefault((wait.exchange.step, wait.rank, wait.last), wait)
    rows = [
        (w.seconds, w.exchange.step, w.rank, f"rank {w.last}", short_name(w.exchange), job.cause(w))
        for w in list(first.values())[:longest]
    ]
    names = ("ms", "batch", "rank", "waited for", "in", "late by")
    console.print(_table("Longest waits", names, rows))
    whole = sum(found.caused.values())
    parts = sorted(found.caused.items(), key=lambda item: -item[1])
    words = ", ".join(f"rank {rank} {seconds / whole:.0%}" for rank, seconds in parts[:longest])
    console.print(f"Of all waiting in exchanges, it was for {words}.")


def _print_gaps(console: Console, found: Findings, longest: int) -> None:
    if not found.gaps:
        console.print("\nNo gaps on the wire between a step's exchanges.")
        return
    rows = [
        (g.seconds, g.step, short_name(g.after), short_name(g.before), f"rank {g.last}")
        for g in found.gaps[:longest]
    ]
    names = ("ms", "batch", "between", "and", "last ready")
    console.print(_table("Longest gaps on the wire", names, rows))


def _ms(seconds: float, digits: int = 2) -> str:
    return f"{1000 * seconds:.{digits}f}"
