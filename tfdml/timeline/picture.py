"""Picture of one step of a job: what each rank computed, exchanged and waited for."""

from pathlib import Path
from typing import Any

from tfdml.timeline.job_timeline import JobTimeline
from tfdml.timeline.lanes import OF_EXCHANGE, lanes_of
from tfdml.timeline.rank_timeline import Kind, Span

_COLORS = {
    Kind.DATA: "#c9b8de",
    Kind.COMPUTE: "#5b9a68",
    Kind.REST: "#d9d9d9",
    Kind.UPDATE: "#e0a458",
    Kind.CALLBACK: "#a98467",
    Kind.CALL: "#8a8a8a",
    Kind.ENCODE: "#8fb8de",
    Kind.EXCHANGE: "#2f5f98",
    Kind.ADD: "#8fb8de",
    Kind.DECODE: "#8fb8de",
    "waiting": "#e6e6e6",
}
_LABELS = dict.fromkeys((Kind.ENCODE, Kind.ADD, Kind.DECODE), "encode, add, decode")


def draw(job: JobTimeline, step: int, path: Path) -> None:
    """Draws a step of all ranks into a PNG, SVG or PDF file.

    Args:
        job: The timelines of all ranks on one clock.
        step: Number of the batch.
        path: The file.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _rows(job, step)
    of_step = [span for _, spans in rows for span in spans if span.step == step]
    begin, end = min(s.begin for s in of_step), max(s.end for s in of_step)
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.3 * len(rows)), layout="constrained")
    bars: dict[str, Any] = {}
    for number, (_, spans) in enumerate(rows):
        for part in (part for span in spans for part in _parts(job, span)):
            left, right = max(part.begin, begin), min(part.end, end)
            if right > left:
                width, start = 1000 * (right - left), 1000 * (left - begin)
                color = _COLORS[part.kind]
                bar = axes.barh(number, width, left=start, color=color, height=0.8)
                bars.setdefault(_LABELS.get(part.kind, part.kind), bar)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows])
    axes.set(xlabel="milliseconds", title=f"Batch {step}")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(bars.values(), bars.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parts(job: JobTimeline, span: Span) -> list[Span]:
    """Returns an exchange as waiting for other ranks and what follows; other spans whole."""
    if span.kind != Kind.EXCHANGE:
        return [span]
    moving = job.moving_since(span)
    return [span._replace(kind="waiting", end=moving), span._replace(begin=moving)]


def _rows(job: JobTimeline, step: int) -> list[tuple[str, list[Span]]]:
    """Returns the picture's rows: of each rank its steps, then its lanes of exchanges."""
    rows = []
    for timeline in job.ranks:
        # Saves are within callbacks, and writes beside them.
        own = [
            s
            for s in timeline.spans
            if s.kind not in OF_EXCHANGE and s.kind not in (Kind.SAVE, Kind.WRITE)
        ]
        rows.append((f"rank {timeline.rank}: steps", own))
        lanes = [[s for s in lane if s.step == step] for lane in lanes_of(timeline)]
        lanes = [lane for lane in lanes if lane]
        rows += [("" if number else "exchanges", lane) for number, lane in enumerate(lanes)]
    return rows
