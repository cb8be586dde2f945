"""Findings in a job's timeline: overlap, waits, and times with nothing on the wire."""

import dataclasses
import statistics
from collections import defaultdict
from typing import NamedTuple

from tfdml.timeline.intervals import common, total, union
from tfdml.timeline.job_timeline import JobTimeline, Wait
from tfdml.timeline.rank_timeline import Kind, RankTimeline, Span


@dataclasses.dataclass(frozen=True)
class RankFindings:
    """Mean times of a rank's recorded steps, in seconds.

    Attributes:
        rank: The rank.
        host: Name of its host.
        step: A step, from its beginning to that of the next one.
        data: Waiting for a batch.
        compute: Computing gradients.
        rest: Time of the exchange that was left after that.
        update: Updating the weights.
        between: Callbacks, saves and calls such as `evaluate` between steps.
        wire: Times at which gradients and others were exchanged, from when the last rank took part.
        hidden: Part of `wire` during which the rank computed gradients.
        waited: Times at which the rank had begun an exchange that another rank had not, and
            exchanged nothing else.
        idle: Times within the exchange of a step at which nothing was on the wire.
    """

    rank: int
    host: str
    step: float
    data: float
    compute: float
    rest: float
    update: float
    between: float
    wire: float
    hidden: float
    waited: float
    idle: float

    @property
    def overlap(self) -> float | None:
        """Fraction of the exchange that computing hid, from 0 to 1; None without exchange."""
        return self.hidden / self.wire if self.wire else None


class Gap(NamedTuple):
    """A time within a step's exchange at which a rank exchanged nothing.

    Attributes:
        rank: The rank.
        step: Number of the batch.
        begin: When the exchange before it ended.
        end: When the next one could begin, because the last rank took part.
        after: The exchange before it.
        before: The exchange after it.
        last: The rank that took part in it last.
    """

    rank: int
    step: int
    begin: float
    end: float
    after: Span
    before: Span
    last: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings in a job's timeline.

    Attributes:
        steps: Numbers of the recorded batches.
        ranks: Of each rank, its times.
        waits: The waits of each step, exchange and rank, the longest first.
        gaps: The gaps on the wire, the longest first; of each, that of the rank with the longest.
        caused: Seconds that other ranks waited for each rank.
    """

    steps: list[int]
    ranks: list[RankFindings]
    waits: list[Wait]
    gaps: list[Gap]
    caused: dict[int, float]


def find(job: JobTimeline) -> Findings:
    """Returns what a timeline tells.

    Args:
        job: The timelines of all ranks on one clock.
    """
    waits = job.waits()
    caused: dict[int, float] = defaultdict(float)
    for wait in waits:
        caused[wait.last] += wait.seconds
    longest: dict[tuple, Gap] = {}
    for gap in (gap for timeline in job.ranks for gap in _gaps(job, timeline)):
        place = gap.step, gap.after.name, gap.before.name
        longest[place] = max(longest.get(place, gap), gap, key=lambda gap: gap.seconds)
    steps = sorted({s.step for t in job.ranks for s in t.spans if s.step is not None})
    return Findings(
        steps=steps,
        ranks=[_of_rank(job, timeline) for timeline in job.ranks],
        waits=waits,
        gaps=sorted(longest.values(), key=lambda gap: -gap.seconds),
        caused=dict(caused),
    )


def _of_rank(job: JobTimeline, timeline: RankTimeline) -> RankFindings:
    spans = _by_kind(timeline)
    steps = {s.step for s in timeline.spans if s.step is not None}
    count = max(len(steps), 1)
    wire = union([(job.moving_since(s), s.end) for s in spans[Kind.EXCHANGE]])
    computing = union([(s.begin, s.end) for s in spans[Kind.COMPUTE]])
    waiting = union([(s.begin, job.moving_since(s)) for s in spans[Kind.EXCHANGE]])
    between = union([(s.begin, s.end) for k in (Kind.CALLBACK, Kind.CALL) for s in spans[k]])
    mean = lambda seconds: seconds / count  # noqa: E731
    of_kind = lambda kind: mean(sum(s.seconds for s in spans[kind]))  # noqa: E731
    return RankFindings(
        rank=timeline.rank,
        host=timeline.host,
        step=_step_seconds(spans),
        data=of_kind(Kind.DATA),
        compute=of_kind(Kind.COMPUTE),
        rest=of_kind(Kind.REST),
        update=of_kind(Kind.UPDATE),
        between=mean(total(between)),
        wire=mean(total(wire)),
        hidden=mean(common(wire, computing)),
        waited=mean(total(waiting) - common(waiting, wire)),
        idle=mean(sum(gap.seconds for gap in _gaps(job, timeline))),
    )


def _step_seconds(spans: dict[str, list[Span]]) -> float:
    """Returns the mean of the times from one step's gradients to the next one's."""
    begins = sorted(s.begin for s in spans[Kind.COMPUTE])
    steps = [b - a for a, b in zip(begins, begins[1:], strict=False)]
    own = [s.seconds for s in spans[Kind.COMPUTE]]
    return statistics.mean(steps or own or [0.0])


def _gaps(job: JobTimeline, timeline: RankTimeline) -> list[Gap]:
    """Returns the times between a rank's exchanges of a step."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in _by_kind(timeline)[Kind.EXCHANGE]:
        by_step[span.step].append(span)
    found = []
    for step, spans in sorted(by_step.items()):
        moving = sorted(((job.moving_since(s), s.end, s) for s in spans), key=lambda m: m[:2])
        _, latest, after = moving[0]
        for begin, end, span in moving[1:]:
            if begin > latest:
                last, _ = job.last(span)
                found.append(Gap(timeline.rank, step, latest, begin, after, span, last))
            if end > latest:
                latest, after = end, span
    return found


def _by_kind(timeline: RankTimeline) -> dict[str, list[Span]]:
    kinds: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        kinds[span.kind].append(span)
    return kinds
