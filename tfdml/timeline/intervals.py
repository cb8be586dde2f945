"""Unions and common parts of time intervals."""

from collections.abc import Sequence

Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Returns the times that are in any of the intervals, as intervals in order.

    Args:
        intervals: Intervals in any order, which may overlap.
    """
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def total(intervals: Sequence[Interval]) -> float:
    """Returns the seconds of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Returns the seconds that are in both of two unions.

    Args:
        first: Intervals that do not overlap.
        second: Others, too.
    """
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
