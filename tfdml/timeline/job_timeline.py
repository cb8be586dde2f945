"""The timelines of all ranks of a job on one clock, and who waited for whom in each exchange."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfdml.timeline.rank_timeline import Clock, Kind, RankTimeline, Span

# Seconds: TensorFlow's timestamps are whole microseconds.
_RESOLUTION = 1e-6
# What can make a rank late for an exchange; a save is within a callback.
_LATE = {Kind.DATA, Kind.COMPUTE, Kind.UPDATE, Kind.CALLBACK, Kind.CALL}


class Wait(NamedTuple):
    """Time that a rank waited in an exchange for the last rank to take part.

    Attributes:
        rank: The rank that waited.
        last: The rank that it waited for.
        exchange: Its span of the exchange.
        end: When the last rank took part, on rank 0's clock.
    """

    rank: int
    last: int
    exchange: Span
    end: float

    @property
    def seconds(self) -> float:
        """Seconds for which the rank waited."""
        return self.end - self.exchange.begin


class JobTimeline:
    """The timelines of all ranks, on rank 0's clock.

    Args:
        ranks: The ranks' timelines, each on its own clock, by rank.

    Attributes:
        ranks: The ranks' timelines on rank 0's clock.
        error: Largest error of the alignment in seconds.
    """

    def __init__(self, ranks: Sequence[RankTimeline]):
        alignments = [_Alignment(timeline.clocks) for timeline in ranks]
        self.error = max(alignment.error for alignment in alignments)
        self.ranks = [
            dataclasses.replace(
                timeline,
                spans=[s._replace(begin=at(s.begin), end=at(s.end)) for s in timeline.spans],
            )
            for timeline, at in zip(ranks, alignments, strict=True)
        ]
        # Spans of each exchange, by step, name and taking part: of each rank its own.
        self._parts: dict[tuple, dict[int, Span]] = defaultdict(dict)
        for timeline in self.ranks:
            for span in timeline.spans:
                if span.kind == Kind.EXCHANGE:
                    self._parts[self._key(span)][timeline.rank] = span

    @classmethod
    def load(cls, directory: Path) -> "JobTimeline":
        """Reads the files of all ranks from a directory.

        Args:
            directory: The directory of a `Timeline`.

        Raises:
            ValueError: If there are none, one is missing, or they are not of one job.
        """
        found = [RankTimeline.load(path) for path in sorted(directory.glob("rank-*.json"))]
        if not found:
            raise ValueError(
                f"DIR must have the files of `tfdml.callbacks.Timeline`, rank-0000.json and so on. "
                f"Received: {directory}, without any. A `fit` writes them after the batches "
                f"`profile_batch`, or at its end."
            )
        jobs = {timeline.job for timeline in found}
        if len(jobs) > 1:
            raise ValueError(
                f"The files in DIR must be of one job. Received: those of {' and of '.join(jobs)} "
                f"in {directory}. Remove the older ones, and copy those of all hosts here again."
            )
        missing = sorted(set(range(found[0].size)) - {timeline.rank for timeline in found})
        if missing:
            raise ValueError(
                f"DIR must have a file of each of the {found[0].size} ranks. Received: {directory} "
                f"without those of ranks {missing}. Copy them from their hosts."
            )
        return cls(found)

    def parts(self, span: Span) -> dict[int, Span]:
        """Returns the spans of all ranks that take part in an exchange, by rank.

        Args:
            span: A rank's span of the exchange.
        """
        return self._parts[self._key(span)]

    def last(self, span: Span) -> tuple[int, float]:
        """Returns the rank that took part in an exchange last, and when it did.

        Args:
            span: A rank's span of the exchange.
        """
        parts = self.parts(span)
        rank = max(parts, key=lambda rank: parts[rank].begin)
        return rank, parts[rank].begin

    def moving_since(self, span: Span) -> float:
        """Returns when all ranks took part in an exchange: then its tensors could be sent.

        Args:
            span: A rank's span of the exchange.
        """
        _, begin = self.last(span)
        return min(begin, span.end) if begin - span.begin > _RESOLUTION else span.begin

    def waits(self) -> list[Wait]:
        """Returns the waits of all ranks in exchanges, the longest first."""
        waits = []
        for timeline in self.ranks:
            for span in timeline.spans:
                if span.kind != Kind.EXCHANGE or self.moving_since(span) <= span.begin:
                    continue
                waits.append(Wait(timeline.rank, self.last(span)[0], span, self.moving_since(span)))
        return sorted(waits, key=lambda wait: -wait.seconds)

    def cause(self, wait: Wait) -> str:
        """Returns what made the last rank late, "" if nothing that is known did.

        That is what it had spent more time on, since the exchanges of the step before, than the
        rank that waited: at least half of the wait.

        Args:
            wait: One of `waits`.
        """
        parts = self.parts(wait.exchange)
        own, others = (self._spent(parts[rank], rank) for rank in (wait.rank, wait.last))
        more = {what: seconds - own.get(what, 0.0) for what, seconds in others.items()}
        cause = max(more, key=more.__getitem__, default="")
        return cause if cause and more[cause] >= wait.seconds / 2 else ""

    def _spent(self, exchange: Span, rank: int) -> dict[str, float]:
        """Returns what a rank spent its time on from the last step's exchanges to an exchange."""
        spans = [s for s in self.ranks[rank].spans if s.begin < exchange.begin]
        ends = [s.end for s in spans if s.kind == Kind.EXCHANGE and s.step < exchange.step]
        since = max(ends, default=0.0)
        seconds: dict[str, float] = defaultdict(float)
        for span in spans:
            spent = min(span.end, exchange.begin) - max(span.begin, since)
            if span.kind in _LATE and spent > 0:
                seconds[f"{span.kind} {span.name}".strip()] += spent
        return seconds

    def _key(self, span: Span) -> tuple:
        return span.step, span.name, tuple(span.details.get("ranks") or ())


class _Alignment:
    """Difference of a rank's clock from rank 0's at any time.

    Clocks run at slightly different speeds, so it changes evenly from the first measurement to the
    last one; but a difference within the errors of both is none.

    Args:
        clocks: The measurements, in order.

    Attributes:
        error: Largest error in seconds; 0 without measurements.
    """

    def __init__(self, clocks: Sequence[Clock]):
        best = min(clocks, key=lambda clock: clock.error, default=Clock(0.0, 0.0, 0.0))
        self._at, self._offset, self.error = best
        self._slope = 0.0
        if len(clocks) < 2:
            return
        first, last = clocks[0], clocks[-1]
        if abs(last.offset - first.offset) > first.error + last.error:
            self._at, self._offset, _ = first
            self._slope = (last.offset - first.offset) / (last.at - first.at)
            self.error = max(first.error, last.error)

    def __call__(self, time: float) -> float:
        """Returns a time of the rank's clock on rank 0's."""
        return time + self._offset + self._slope * (time - self._at)
