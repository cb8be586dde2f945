"""First difference between ranks: which one keeps the others waiting, in which exchange.

Ranks pair exchanges by name and turn. They may begin concurrent ones in different orders, so what
counts is which of them a rank has begun, not when.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tfdml.runtime.hang_report.exchange_log import Exchange
from tfdml.runtime.hang_report.rank_report import RankReport


class Difference(NamedTuple):
    """The rank that departs from the others, and a sentence that says how, without a period."""

    rank: int
    sentence: str


class _Wait(NamedTuple):
    """An exchange in which ranks wait.

    Attributes:
        exchange: The exchange, as the first of them noted it.
        ranks: The ranks that are in it.
        missing: The ranks that have not begun it.
    """

    exchange: Exchange
    ranks: list[int]
    missing: list[int]


def first_difference(reports: Sequence[RankReport]) -> Difference | None:
    """Returns the rank that keeps others waiting; None if none does, or none can be told.

    Args:
        reports: Reports on all ranks, in their order.
    """
    by_rank = {report.rank: report for report in reports}
    known = [report for report in reports if report.exchanges is not None]
    waits = _find_waits(known)
    if not waits:
        return None
    silent = next((r for r in reports if r.exchanges is None), None)
    if silent is not None:
        return Difference(silent.rank, _of_silent(silent, waits[0]))
    waiting = {rank for wait in waits for rank in wait.ranks}
    for wait in waits:
        free = [rank for rank in wait.missing if rank not in waiting]
        if free:
            # It waits for nobody: nothing but itself keeps it from the exchange.
            report = by_rank[free[0]]
            inside = f", inside {report.library}" if report.place and report.library else ""
            sentence = f"{_never_began(wait, report)}; it is {_place(report)}{inside}"
            return Difference(report.rank, sentence)
    if any(wait.missing for wait in waits):
        return _odd_one(known, waits)
    return _unfinished(known, waits)


def _find_waits(known: Sequence[RankReport]) -> list[_Wait]:
    """Returns the exchanges in which ranks wait, in the order in which a rank began them."""
    waits: dict[tuple[str, int], _Wait] = {}
    for report in known:
        for exchange in report.exchanges:
            key = exchange.name, exchange.turn
            if not exchange.is_open:
                continue
            if key not in waits:
                missing = [r.rank for r in known if r.turns.get(exchange.name, 0) < exchange.turn]
                waits[key] = _Wait(exchange, [], missing)
            waits[key].ranks.append(report.rank)
    return list(waits.values())


def _of_silent(silent: RankReport, wait: _Wait) -> str:
    where = f"; it was {_place(silent)}" if silent.place or silent.activity else ""
    state = silent.state or "did not report"
    return f"rank {silent.rank} {state}, while {_ranks(wait.ranks)} in {wait.exchange.name}{where}"


def _never_began(wait: _Wait, report: RankReport) -> str:
    return f"rank {report.rank} never began {wait.exchange.name}, in which {_ranks(wait.ranks)}"


def _odd_one(known: Sequence[RankReport], waits: Sequence[_Wait]) -> Difference:
    """Returns the difference where all wait, in different exchanges: of the fewest ranks' wait.

    Of two ranks, it is the one that departs from the order of its own exchanges before, else the
    second.
    """
    first = {rank: wait for wait in reversed(waits) for rank in wait.ranks}
    groups = {id(wait): sum(w is wait for w in first.values()) for wait in waits}
    by_rank = {report.rank: report for report in known}

    def oddness(rank: int) -> tuple[int, bool, int]:
        departs = _departs(by_rank[rank], first[rank].exchange)
        return -groups[id(first[rank])], departs, rank

    odd = max((rank for wait in waits for rank in wait.missing), key=oddness)
    other = next(wait for wait in waits if odd in wait.missing)
    sentence = _never_began(other, by_rank[odd])
    # Either may be where it should not be: of two ranks nothing tells which.
    waiting, place = _place(by_rank[other.ranks[0]]), _place(by_rank[odd])
    if waiting != place:
        sentence += f", {waiting}"
    began = first[odd].exchange.name
    return Difference(odd, f"{sentence}; it began {began} instead, {place}")


def _departs(report: RankReport, waited_for: Exchange) -> bool:
    """Returns whether a rank's exchange follows another one than exchanges of its name did before.

    The exchange before it tells: what came after it the last time is what was to come now.
    """
    names = [exchange.name for exchange in report.exchanges]
    last = next(
        i
        for i, e in enumerate(report.exchanges)
        if (e.name, e.turn) == (waited_for.name, waited_for.turn)
    )
    if last == 0:
        return False
    before = [names[i + 1] for i, name in enumerate(names[: last - 1]) if name == names[last - 1]]
    return bool(before) and waited_for.name not in before


def _unfinished(known: Sequence[RankReport], waits: Sequence[_Wait]) -> Difference | None:
    """Returns a rank that waits in an exchange that others have ended; None if all are in it."""
    for wait in waits:
        ended = [r.rank for r in known if r.rank not in wait.ranks]
        if ended:
            rank = wait.ranks[0]
            done = ", ".join(map(str, ended))
            return Difference(
                rank,
                f"rank {rank} waits in {wait.exchange.name}, which "
                f"{'rank' if len(ended) == 1 else 'ranks'} {done} ended",
            )
    return None


def _place(report: RankReport) -> str:
    return report.place or f'last in "{report.activity}"'


def _ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as a subject and its verb: "ranks 0 and 2 wait"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    if len(ranks) > 4:
        return f"ranks {ranks[0]}, {ranks[1]} and {len(ranks) - 2} others wait"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait"
