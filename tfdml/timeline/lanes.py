"""Lanes of a picture, in which spans of exchanges that overlap lie side by side."""

from collections import defaultdict
from collections.abc import Collection

from tfdml.timeline.rank_timeline import Kind, RankTimeline, Span

OF_EXCHANGE = frozenset({Kind.ENCODE, Kind.EXCHANGE, Kind.ADD, Kind.DECODE})


def lanes_of(timeline: RankTimeline) -> list[list[Span]]:
    """Returns a rank's spans of exchanges and codecs, in as few lanes as they need.

    What belongs to a bucket is in one lane; other spans of the lane are before or after it.

    Args:
        timeline: The rank's timeline.
    """
    coded = {span.name for span in timeline.spans if span.kind == Kind.DECODE}
    buckets: dict[tuple, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in OF_EXCHANGE:
            buckets[span.step, _bucket(span.name, coded)].append(span)
    lanes: list[list[Span]] = []
    ends: list[float] = []
    for spans in sorted(buckets.values(), key=lambda spans: min(s.begin for s in spans)):
        begin = min(span.begin for span in spans)
        lane = next((i for i, end in enumerate(ends) if end <= begin), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(begin)
        lanes[lane] += spans
        ends[lane] = max(span.end for span in spans)
    return lanes


def _bucket(name: str, coded: Collection[str]) -> str:
    """Returns the bucket with a codec that an exchange belongs to, else the exchange's own name."""
    parent = name
    while parent and parent not in coded:
        parent = parent.rpartition("/")[0]
    return parent or name
