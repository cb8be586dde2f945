"""State of every rank as known to rank 0, and the rules that decide when the job must end."""

import dataclasses
from collections.abc import Sequence

# Seconds between an error that leaves a call of `fit` and the end of the ranks still in it. If all
# ranks raise, as they do for an invalid argument, the program decides what happens next.
LEFT_GRACE = 5.0
# The same for an uncaught error: that rank is about to end.
RAISED_GRACE = 0.5
# Seconds that a rank may still wait for one that has ended its program.
BYE_GRACE = 10.0
# Seconds that ranks may wait in different operations; a last step may run past its exchange.
DIFFERENT_GRACE = 15.0
# Seconds that all ranks wait in the same step before the collectives of their graphs are compared.
MISMATCH_GRACE = 5.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception on a rank.

    Attributes:
        error: Description of the exception.
        activity: Activity of the rank when it was raised.
        call: Number of the call that it left; None if it was uncaught.
        consequence: Whether it looks like an effect of another rank's end: a broken connection.
        time: Time of the report, in seconds of the monotonic clock.
    """

    error: str
    activity: str
    call: int | None
    consequence: bool
    time: float


@dataclasses.dataclass
class RankStatus:
    """Last known state of a rank. Times are in seconds of the monotonic clock.

    Attributes:
        rank: Rank number.
        host: Host name.
        pid: Process id.
        heard: Time of its last message.
        beat: Last heartbeat; see `Heartbeats`.
        moved: Time of its last progress.
        bye: Time at which its program ended; None while it runs.
        lost: Whether its connection is broken.
        left: Reason why rank 0 has ended; "" while it has not.
        failure: Last exception.
        collectives: Collectives in the last graph of each of its steps; see `Activity`.
    """

    rank: int
    host: str
    pid: int
    heard: float
    beat: dict = dataclasses.field(default_factory=dict)
    moved: float = 0.0
    bye: float | None = None
    lost: bool = False
    left: str = ""
    failure: Failure | None = None
    collectives: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    def hear(self, message: dict, now: float) -> None:
        """Updates the state from a message of this rank."""
        self.heard = now
        kind = message.get("kind")
        if kind == "beat":
            if message.get("progress") != self.beat.get("progress"):
                self.moved = now
            self.beat = message
            if message.get("collectives") is not None:  # None means unchanged.
                self.collectives = message["collectives"]
            failed = self.failure.call if self.failure else None
            if failed is not None and message.get("calls", 0) > failed:
                self.failure = None  # The program caught it and has begun another call.
        elif kind == "failure":
            error, activity = str(message.get("error")), str(message.get("activity"))
            if self.failure is not None and _same(self.failure.error, error):
                activity = (
                    self.failure.activity
                )  # The same error: it left a call and was not caught.
            consequence = bool(message.get("consequence"))
            self.failure = Failure(error, activity, message.get("call"), consequence, now)
        elif kind == "bye":
            self.bye = now
        elif kind == "left":
            self.left = str(message.get("why"))

    def describe(self, now: float) -> str:
        """Describes the rank: host, process, last message and activity."""
        activity = self.failure.activity if self.failure else self.beat.get("activity", "starting")
        return (
            f"rank {self.rank}: host {self.host}, pid {self.pid}, last "
            f"heard from {max(0.0, now - self.heard):.1f} s before\n  where: {activity}"
        )

    @property
    def runs(self) -> bool:
        """True if the rank has neither ended nor been lost."""
        return self.bye is None and not self.lost

    @property
    def waits_for(self) -> str | None:
        """Operation in which the rank waits for the others, None if in none."""
        return self.beat.get("waits_for") if self.runs else None


def _same(one: str, other: str) -> bool:
    return one.splitlines()[:1] == other.splitlines()[:1]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason for ending the job.

    Attributes:
        rank: Rank that is the cause.
        why: Failure, as a predicate of "rank N".
        error: Description of its exception, "" if none.
        likely: Likely cause.
    """

    rank: int
    why: str
    error: str
    likely: str


_LIKELY_DEAD = (
    "it was killed (out of memory? see `dmesg`), a crash in native code, `os._exit`, or "
    "its machine crashed"
)
_LIKELY_SILENT = "it was stopped (SIGSTOP, a debugger), its machine froze, or the network is cut"
_LIKELY_LEFT = "rank 0 was stopped, its machine froze, or the network was cut for a while"
_LIKELY_CUT_OFF = "its machine is cut off from the network, or all other ranks were stopped"
_LIKELY_MISMATCH = (
    "code that only some ranks run, such as `if rank == 0: model.evaluate(...)`, or a "
    "different number of variables or of calls"
)


def verdict(members: Sequence[RankStatus], limit: float, now: float) -> Verdict | None:
    """Returns the reason to end the job now, or None to let it run.

    Args:
        members: State of all ranks.
        limit: Seconds that a rank may be silent, or wait in an operation different from others'.
        now: Current time, in seconds of the monotonic clock.
    """
    return (
        _find_lost(members, limit, now)
        or _find_failure(members, now)
        or _find_ended(members, members, now)
        or _find_different_waits(members, limit, now)
    )


def verdict_of_rank_0(
    rank_0: RankStatus, own: RankStatus, limit: float, now: float
) -> Verdict | None:
    """Returns the verdict on rank 0 that another rank reaches on its own; see `verdict`."""
    if own.failure and own.failure.consequence and now - rank_0.heard > LEFT_GRACE:
        return _silent(rank_0, now)
    return _find_lost([rank_0], limit, now) or _find_ended([rank_0], [own], now)


def _find_lost(members: Sequence[RankStatus], limit: float, now: float) -> Verdict | None:
    for member in members:
        if member.left:
            why = f"gave up on rank 0, which {member.left}"
            return Verdict(member.rank, why, "", _LIKELY_LEFT)
        if member.lost and member.bye is None:
            if member.failure and not member.failure.consequence:
                return _raised(member)
            if member.failure is None:
                return Verdict(member.rank, "died", "", _LIKELY_DEAD)
    return _find_silent(members, limit, now)


def _find_silent(members: Sequence[RankStatus], limit: float, now: float) -> Verdict | None:
    """Returns a verdict if a rank has been silent for longer than `limit` seconds."""
    quiet = max((m for m in members if m.runs), key=lambda m: now - m.heard, default=None)
    if quiet is None or now - quiet.heard <= limit:
        return None
    # Of three ranks or more, it is rather rank 0 that is cut off than all others. They were last
    # heard at slightly different times.
    others = [m for m in members[1:] if m.runs]
    if len(others) > 1 and all(now - m.heard > limit / 2 for m in others):
        why = f"hears no other rank (for {now - quiet.heard:.1f} s)"
        return Verdict(members[0].rank, why, "", _LIKELY_CUT_OFF)
    return _silent(quiet, now)


def _silent(member: RankStatus, now: float) -> Verdict:
    why = f"fell silent (nothing heard for {now - member.heard:.1f} s)"
    return Verdict(member.rank, why, "", _LIKELY_SILENT)


def _raised(member: RankStatus) -> Verdict:
    return Verdict(member.rank, "raised an exception", member.failure.error, "see its traceback")


def _find_failure(members: Sequence[RankStatus], now: float) -> Verdict | None:
    failed = [m for m in members if m.failure is not None]
    own = [m for m in failed if not m.failure.consequence]
    ended = next((m for m in members if m.bye is not None and m.failure is None), None)
    first = min(failed, key=lambda m: m.failure.time, default=None)
    if ended and first and not own and now - first.failure.time > RAISED_GRACE:
        why = f"has ended its program, while rank {first.rank} was in {first.failure.activity}"
        return Verdict(ended.rank, why, "", _LIKELY_MISMATCH)
    due = [
        m for m in failed if now - m.failure.time > _grace(m.failure) and _others_wait(m, members)
    ]
    if not due:
        return None
    # A rank's own exception takes precedence over an effect of another rank's end; so does a rank
    # that has missed some heartbeats.
    if own:
        return _raised(min(own, key=lambda m: m.failure.time))
    silent = _find_silent(members, LEFT_GRACE, now)
    return silent or _raised(min(due, key=lambda m: m.failure.time))


def _grace(failure: Failure) -> float:
    return RAISED_GRACE if failure.call is None and not failure.consequence else LEFT_GRACE


def _others_wait(failed: RankStatus, members: Sequence[RankStatus]) -> bool:
    """Returns whether a rank is still in a call that `failed` has left with an exception."""
    call = failed.failure.call
    if call is None:
        return True
    return any(
        m.runs and m.beat.get("call") is not None and m.beat.get("calls", 0) <= call
        for m in members
        if m is not failed
    )


def _find_ended(
    members: Sequence[RankStatus], waiting: Sequence[RankStatus], now: float
) -> Verdict | None:
    """Returns a verdict if a rank has ended its program while others wait for it."""
    for ended in members:
        if ended.bye is None or now - ended.bye < BYE_GRACE:
            continue
        for member in waiting:
            if member.waits_for and now - member.moved > BYE_GRACE:
                why = (
                    f"ended its program, while rank {member.rank} waits for it in "
                    f"{member.waits_for} ({member.beat.get('activity')})"
                )
                return Verdict(ended.rank, why, "", _LIKELY_MISMATCH)
    return None


def _find_different_waits(
    members: Sequence[RankStatus], limit: float, now: float
) -> Verdict | None:
    """Returns a verdict if all ranks have long been waiting in different operations."""
    waits = [m.waits_for for m in members]
    waiting = min(now - m.moved for m in members)
    if None in waits or waiting < min(limit, MISMATCH_GRACE):
        return None
    tracing = any(m.beat.get("tracing") for m in members)
    if len(set(waits)) == 1:
        # The step may just be long: ranks are left alone if their graphs have the same collectives
        # or one is still being traced.
        return None if tracing else _find_different_collectives(members)
    if tracing or waiting < min(limit, DIFFERENT_GRACE):
        return None
    odd = next(m for m in members if waits.count(m.waits_for) == min(map(waits.count, waits)))
    others = next(m for m in members if m.waits_for != odd.waits_for)
    why = (
        f"waits in {odd.waits_for}, while rank {others.rank} waits in {others.waits_for} "
        f"({others.beat.get('activity')})"
    )
    return Verdict(odd.rank, why, "", _LIKELY_MISMATCH)


def _find_different_collectives(members: Sequence[RankStatus]) -> Verdict | None:
    """Returns a verdict if the graphs of two ranks have different collectives."""
    first, others = _collectives(members[0]), members[1:]
    for member in others:
        own = _collectives(member)
        for activity in dict.fromkeys([*own, *first]):
            if _differ(own.get(activity), first.get(activity)):
                why = (
                    f"exchanges something different from rank {members[0].rank} in one step: "
                    f"{activity[1]} is {own.get(activity, 'missing')} there, "
                    f"{first.get(activity, 'missing')} on rank {members[0].rank}"
                )
                return Verdict(member.rank, why, "", _LIKELY_MISMATCH)
    return None


def _differ(one: str | None, other: str | None) -> bool:
    """Returns whether two operations exchange different tensors; an unknown shape matches any."""
    known = one is None or other is None or "None" not in one + other
    return one != other and known


def _collectives(member: RankStatus) -> dict[tuple[str, str], str]:
    """Returns the tensors that a rank's graphs exchange, by step and operation."""
    return {(s, name): of for s, found in member.collectives.items() for name, of in found.items()}
