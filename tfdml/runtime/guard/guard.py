"""Guard that ends all ranks of a job when one of them cannot continue.

Each process runs a guard thread. The others connect to rank 0's, and all send heartbeats. Rank 0
decides (`verdict.verdict`) and informs all ranks; if rank 0 itself is lost, each of the others
detects that on its own. No exception reaches a main thread that is blocked in a collective, so the
guard thread prints the reason and ends the process.
"""

import atexit
import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

from tfdml.collectives.collective import Collective
from tfdml.collectives.observed_collective import ExchangeListener
from tfdml.runtime import host_clock
from tfdml.runtime.descriptions import describe_error
from tfdml.runtime.errors import OtherRankError
from tfdml.runtime.guard.activity import Activity
from tfdml.runtime.guard.connecting import connect_ranks
from tfdml.runtime.guard.exchange_watch import ExchangeWatch
from tfdml.runtime.guard.heartbeats import Heartbeats
from tfdml.runtime.guard.remote_clock import ClockReading, RemoteClock, answer
from tfdml.runtime.guard.reporting import Reporting
from tfdml.runtime.guard.verdict import LEFT_GRACE, RankStatus, Verdict, verdict, verdict_of_rank_0
from tfdml.runtime.hang_report.exchange_log import EXCHANGE_LOG
from tfdml.runtime.hang_report.job_files import new_job_directory
from tfdml.runtime.immediate_exit import (
    EXIT_CODE,
    EXIT_SECONDS,
    SHUTDOWN_SECONDS,
    end_after,
    end_despite_tensorflow,
    end_now,
)
from tfdml.runtime.plain_words import BROKEN
from tfdml.runtime.timing.exchange_timer import ExchangeTimer
from tfdml.runtime.timing.time_recorder import TimeRecorder

# Seconds that the other ranks outlive the message on one that raised.
_LAST_SECONDS = SHUTDOWN_SECONDS + 0.3

_CONSEQUENCES = (OtherRankError, *BROKEN)


class Guard:
    """One process's part of the guard.

    Args:
        collective: Collective that carries rank 0's address and secret; used only once.
        limit: Seconds without a message after which a rank counts as lost.

    Attributes:
        activity: Current activity of the main thread, which updates it.
        recorder: TimeRecorder of this process's timeline.
        listeners: Listeners to this process's exchanges.
        job: Text that tells this job from others: the same on all ranks.
    """

    def __init__(self, collective: Collective, limit: float):
        self.activity = Activity()
        self.recorder = TimeRecorder()
        watch = ExchangeWatch(self.activity, EXCHANGE_LOG)
        self.listeners: Sequence[ExchangeListener] = (watch, ExchangeTimer(self.recorder))
        self._rank, self._size = collective.rank, collective.size
        self._limit = limit
        self._beat = min(1.0, limit / 4)
        self._ending = threading.Event()
        self._announced = threading.Event()
        self._uncaught = False
        identity = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()}
        if self._rank == 0:
            identity["reports"] = str(new_job_directory())
        self._events: queue.Queue = queue.Queue()
        self._channels, identities = connect_ranks(collective, identity)
        self._members = {who["rank"]: _member(who) for who in identities}
        self.job = f"{self._members[0].host}, process {self._members[0].pid}"
        self._clock = RemoteClock(lambda question: self._channels[0].send(question))
        self._heartbeats = Heartbeats(self.activity)
        self._reporting = Reporting(
            next(who["reports"] for who in identities if who["rank"] == 0),
            self._rank,
            self._members,
            self.activity,
            self._send_to,
        )
        self._start(self._run_hub if self._rank == 0 else self._run_spoke)
        previous = sys.excepthook
        sys.excepthook = lambda *error: self._on_uncaught(previous, *error)
        atexit.register(self._say_bye)

    def _start(self, target, *arguments: object) -> None:
        def run() -> None:
            try:
                target(*arguments)
            except Exception:  # noqa: BLE001 (whatever it is, the job ends and says so)
                # Otherwise the others would end the job later, and blame a healthy rank's silence.
                if not self._ending.is_set():
                    details = traceback.format_exc()
                    message = f"tfdml: the guard itself failed on rank {self._rank}: {details}"
                    self._end(message, self._rank)

        threading.Thread(target=run, name="tfdml-guard", daemon=True).start()

    # -- Reports of the main thread ------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context manager: this process is in a call that all processes make, such as `fit`."""
        if self.activity.call is not None:  # `fit` calls `evaluate`.
            with self.activity.within(name):
                yield
            return
        self.activity.begin(name)
        number = self.activity.calls
        try:
            yield
        except Exception as error:
            self._tell_failure(error, number)
            self.wait_for_verdict(error)
            raise
        finally:
            self.activity.end()

    def wait_for_verdict(self, error: Exception) -> None:
        """Gives rank 0 time to report the lost rank that may be the cause, and to end this one.

        Args:
            error: Error of an exchange; if no lost rank can be its cause, there is no wait.
        """
        if isinstance(error, BROKEN):
            self._announced.wait(LEFT_GRACE + 2 * self._beat)

    def _tell_failure(self, error: BaseException, call: int | None) -> None:
        self.activity.failed = True
        self._tell(
            {
                "kind": "failure",
                "error": describe_error(error),
                "activity": self.activity.describe(),
                "call": call,
                "consequence": isinstance(error, _CONSEQUENCES),
            }
        )

    def _on_uncaught(self, previous, kind, error, trace) -> None:
        previous(kind, error, trace)
        self._uncaught = True
        self._ending.set()
        self._tell_failure(error, None)
        # Only as long as rank 0 needs to inform all. Then this process exits normally, unless an
        # exit handler waits for the others.
        self._announced.wait(LEFT_GRACE)
        end_despite_tensorflow(SHUTDOWN_SECONDS)

    def _say_bye(self) -> None:
        self._tell({"kind": "bye"})
        if self._rank == 0:
            for other in self._channels.values():
                other.send({"kind": "bye"})
        self._ending.set()
        self._reporting.close()

    def _tell(self, message: dict) -> None:
        if self._rank == 0:
            self._events.put((0, message))
        else:
            self._members[self._rank].hear(message, time.monotonic())
            self._channels[0].send(message)

    def _send_to(self, rank: int, message: dict) -> None:
        """Sends a message to rank 0, or from there to any rank, itself included."""
        if rank == self._rank == 0:
            self._events.put((0, message))
        else:
            self._channels[rank].send(message)

    def read_clock(self) -> ClockReading | None:
        """Returns the difference of rank 0's clock from this rank's; None if it cannot be known."""
        if self._rank == 0:
            return ClockReading(host_clock.now(), 0.0, 0.0)
        return self._clock.read()

    # -- The thread ----------------------------------------------------------------------------

    def _run_hub(self) -> None:
        for rank in self._channels:
            self._start(self._listen_to, rank)
        next_beat = 0.0
        ending: tuple[Verdict, str] | None = None
        while True:
            with contextlib.suppress(queue.Empty):
                rank, message = self._events.get(timeout=self._beat / 2)
                if message is None:
                    self._members[rank].lost = True
                else:
                    self._members[rank].hear(message, time.monotonic())
                    self._reporting.hear(message)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat
                beat = self._heartbeats.next()
                self._members[0].hear(beat, now)
                for other in self._channels.values():
                    other.send(beat)
            if ending is None:
                members = [self._members[r] for r in sorted(self._members)]
                found = verdict(members, self._limit, now)
                ending = found and (found, self._explain(found, now))
            concluded = self._reporting.collect(now, self._beat, ending is not None)
            if concluded is not None and ending is not None:
                found, message = ending[0], f"{ending[1]}\n{concluded}"
                more = {"raised": bool(found.error)}
                for other in self._channels.values():
                    other.send({"kind": "end", "message": message, "rank": found.rank, **more})
                return self._end(message, found.rank, **more)

    def _listen_to(self, rank: int) -> None:
        try:
            while True:
                message = self._channels[rank].receive(3600.0)
                if message is not None and message.get("kind") == "clock":
                    # Here, because the hub's thread may be busy.
                    self._channels[rank].send(answer(message))
                elif message is not None:
                    self._events.put((rank, message))
        except ConnectionError:
            self._events.put((rank, None))

    def _run_spoke(self) -> None:
        hub, rank_0 = self._channels[0], self._members[0]
        next_beat = 0.0
        while True:
            try:
                message = hub.receive(self._beat / 2)
            except ConnectionError:
                message = None
                rank_0.lost = True
            now = time.monotonic()
            if message is not None and message.get("kind") == "clock":
                self._clock.hear(message)
            if message is not None:
                rank_0.hear(message, now)
                if message.get("kind") == "end":
                    rank, raised = int(message.get("rank", 0)), bool(message.get("raised"))
                    return self._end(str(message.get("message")), rank, raised)
                self._reporting.hear(message)
            self._reporting.answer_request(now)
            if now >= next_beat:
                next_beat = now + self._beat
                own = self._heartbeats.next()
                self._members[self._rank].hear(own, now)
                hub.send(own)
            # Rank 0 decides everything else; only its own loss is detected here.
            found = verdict_of_rank_0(rank_0, self._members[self._rank], self._limit, now)
            if found is not None and not self._ending.is_set():
                # If rank 0 hears this after all, it knows why the connection ends.
                hub.send({"kind": "left", "why": found.why})
                message = self._explain(found, now)
                return self._end(f"{message}\n{self._reporting.report_alone()}", 0)
            if rank_0.lost:
                time.sleep(self._beat / 2)

    # -- The end -------------------------------------------------------------------------------

    def _explain(self, found: Verdict, now: float) -> str:
        lines = [
            f"tfdml: the job ends on all {self._size} ranks, because rank {found.rank} "
            f"{found.why}.",
            f"  {self._members[found.rank].describe(now)}",
        ]
        if found.error:
            lines.append("  error: " + found.error.replace("\n", "\n    "))
        lines.append(f"  likely cause: {found.likely}.")
        return "\n".join(lines)

    def _end(self, message: str, rank: int, raised: bool = False) -> None:
        own = f"(This is rank {self._rank}, {self.activity.describe()}.)"
        os.write(2, f"\n{message}\n  {own}\n".encode())
        if self._ending.is_set() or (rank == self._rank and self.activity.failed):
            # This rank raised, or is already exiting: let it exit normally.
            self._announced.set()
            end_after(EXIT_SECONDS, code=1 if self._uncaught else EXIT_CODE)
            return
        if raised:
            # A launcher that ends all ranks with the first must see that one's exit code.
            time.sleep(_LAST_SECONDS)
        # Time to deliver the message: the other ranks must not take rank 0 for dead.
        time.sleep(0.2 if self._rank == 0 else 0.0)
        end_now()


def _member(identity: dict) -> RankStatus:
    now = time.monotonic()
    return RankStatus(identity["rank"], identity["host"], identity["pid"], heard=now, moved=now)


_guards: dict[tuple[int, int], Guard] = {}


def get_guard(collective: Collective, limit: float) -> Guard:
    """Returns this process's guard; the first strategy of a job starts it."""
    key = (collective.rank, collective.size)
    if key not in _guards:
        _guards[key] = Guard(collective, limit)
    return _guards[key]
