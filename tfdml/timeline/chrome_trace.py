"""Traces for Perfetto and chrome://tracing: a process for each rank, arrows between exchanges.

The format is Google's Trace Event Format: complete events "X", the beginnings "s" and ends "f" of
arrows, and names "M".
"""

from collections.abc import Iterator
from typing import Any

from tfdml.timeline.job_timeline import JobTimeline
from tfdml.timeline.lanes import OF_EXCHANGE, lanes_of
from tfdml.timeline.rank_timeline import Kind, RankTimeline, Span, short_name

# Threads of a rank's process in the trace; then one for each lane of exchanges.
_STEPS, _WRITER, _FIRST_LANE = 0, 1, 2
# Viewers take threads of all processes for different ones only if their numbers differ, and one
# with its process's number for the main thread. 0 is the system's.
_THREADS = 1000
# Kinds whose spans are known by their names, too.
_NAMED = {Kind.CALLBACK, Kind.CALL, Kind.SAVE, Kind.WRITE}


def chrome_trace(job: JobTimeline) -> dict[str, Any]:
    """Returns a trace in the format's JSON object form, for `json.dump`.

    Args:
        job: The timelines of all ranks on one clock.
    """
    return {"traceEvents": list(_Events(job).all()), "displayTimeUnit": "ms"}


class _Events:
    """Events of a trace; times are microseconds since the first span begins."""

    def __init__(self, job: JobTimeline):
        self._job = job
        self._start = min((s.begin for t in job.ranks for s in t.spans), default=0.0)
        self._lanes = {timeline.rank: lanes_of(timeline) for timeline in job.ranks}
        # The thread of each exchange's span, by rank, step and name.
        self._threads = {
            (rank, span.step, span.name): thread
            for rank, lanes in self._lanes.items()
            for thread, spans in enumerate(lanes, _FIRST_LANE)
            for span in spans
            if span.kind == Kind.EXCHANGE
        }

    def all(self) -> Iterator[dict[str, Any]]:
        """Yields all events."""
        for timeline in self._job.ranks:
            yield from self._titles(timeline)
            yield from self._spans(timeline)
        yield from self._arrows()

    def _titles(self, timeline: RankTimeline) -> Iterator[dict[str, Any]]:
        rank, lanes = timeline.rank, len(self._lanes[timeline.rank])
        own = {"ph": "M", **_place(rank, _STEPS)}
        yield {**own, "name": "process_name", "args": {"name": f"rank {rank} ({timeline.host})"}}
        yield {**own, "name": "process_sort_index", "args": {"sort_index": rank}}
        titles = ["steps", "checkpoint writer", *(f"exchanges {i + 1}" for i in range(lanes))]
        for thread, name in enumerate(titles):
            own = {"ph": "M", **_place(rank, thread)}
            yield {**own, "name": "thread_name", "args": {"name": name}}
            yield {**own, "name": "thread_sort_index", "args": {"sort_index": thread}}

    def _spans(self, timeline: RankTimeline) -> Iterator[dict[str, Any]]:
        for span in timeline.spans:
            if span.kind not in OF_EXCHANGE:
                thread = _WRITER if span.kind == Kind.WRITE else _STEPS
                name = f"{span.kind} {span.name}" if span.kind in _NAMED else span.kind
                yield self._complete(span, timeline.rank, thread, name)
        for thread, spans in enumerate(self._lanes[timeline.rank], _FIRST_LANE):
            for span in spans:
                name = short_name(span)
                yield self._complete(span, timeline.rank, thread, name)
                moving = self._job.moving_since(span) if span.kind == Kind.EXCHANGE else span.begin
                if moving > span.begin:
                    last, _ = self._job.last(span)
                    wait = span._replace(kind="waiting", end=moving, details={})
                    name = f"waiting for rank {last}"
                    yield self._complete(wait, timeline.rank, thread, name)

    def _complete(self, span: Span, rank: int, thread: int, name: str) -> dict[str, Any]:
        details = {"name": span.name, "batch": span.step, **span.details}
        return {
            "ph": "X",
            "name": name,
            "cat": span.kind,
            **_place(rank, thread),
            "ts": self._micros(span.begin),
            "dur": self._micros(span.end) - self._micros(span.begin),
            "args": {key: value for key, value in details.items() if value not in (None, "")},
        }

    def _arrows(self) -> Iterator[dict[str, Any]]:
        """Yields arrows from the rank that took part in an exchange last to the others."""
        number = 0
        for timeline in self._job.ranks:
            for span in timeline.spans:
                if span.kind != Kind.EXCHANGE or self._job.last(span)[0] != timeline.rank:
                    continue
                for rank, part in sorted(self._job.parts(span).items()):
                    if rank == timeline.rank:
                        continue
                    number += 1
                    yield self._end_of_arrow("s", number, timeline.rank, span)
                    # "e": it ends at the slice around this time, not at the next one to begin.
                    yield {**self._end_of_arrow("f", number, rank, part), "bp": "e"}

    def _end_of_arrow(self, phase: str, number: int, rank: int, span: Span) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": span.name,
            "cat": "exchange",
            "id": number,
            **_place(rank, self._threads[rank, span.step, span.name]),
            "ts": self._micros(self._job.moving_since(span)),
        }

    def _micros(self, time: float) -> int:
        # Whole numbers: of two spans of which one ends where the other begins, neither may reach
        # into the other one, or viewers drop it.
        return round((time - self._start) * 1e6)


def _place(rank: int, thread: int) -> dict[str, int]:
    """Returns the numbers of a rank's process and of one of its threads."""
    process = (rank + 1) * _THREADS
    return {"pid": process, "tid": process + thread}
