"""Report on one rank: what it has exchanged, and where its threads are."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tfdml.runtime.hang_report import job_files
from tfdml.runtime.hang_report.exchange_log import Exchange, ExchangeLog
from tfdml.runtime.hang_report.stacks import (
    StackFile,
    describe_library,
    describe_place,
    main_frames,
    main_thread_of,
)

# States of ranks that did not report, as predicates of "rank N".
STOPPED = "is stopped (SIGSTOP, a debugger)"
GONE = "has died"
NO_PYTHON = "runs, but not its Python: a thread holds the interpreter's lock"
UNHEARD = "does not answer"

# Characters of stacks in a message to rank 0; a rank's own file has all of them.
_SENT_CHARACTERS = 100_000
# Seconds that TensorFlow gets to hand out the notes of graphs.
_COLLECT_SECONDS = 1.0


@dataclasses.dataclass
class RankReport:
    """Report on one rank: its place, exchanges and state, as far as they are known.

    Attributes:
        rank: Rank number.
        where: Its host and process, in words.
        activity: Activity of its main thread, as the guard knows it.
        state: Why it has not reported itself, as a predicate of "rank N"; "" if it has.
        place: Where its main thread is, such as "in on_batch_end at train.py:31"; "" if unknown.
        library: Function of a library that it has called there, and where in that it is; "" if it
            is in the program's own code.
        exchanges: Its last exchanges, in the order begun; None if unknown.
        turns: How many of each name it has begun.
        stacks: Stacks of all its threads, as `faulthandler` writes them.
    """

    rank: int
    where: str
    activity: str
    state: str = ""
    place: str = ""
    library: str = ""
    exchanges: Sequence[Exchange] | None = None
    turns: dict[str, int] = dataclasses.field(default_factory=dict)
    stacks: str = ""

    def to_message(self) -> dict:
        """Returns the report as a message to rank 0."""
        return {**dataclasses.asdict(self), "stacks": self.stacks[:_SENT_CHARACTERS]}

    @classmethod
    def from_message(cls, message: dict) -> "RankReport":
        """Returns the report in a message."""
        exchanges = message["exchanges"]
        if exchanges is not None:
            exchanges = [Exchange(**exchange) for exchange in exchanges]
        return cls(**{**message, "exchanges": exchanges})

    def in_words(self) -> str:
        """Returns the report as text, for people."""
        lines = [f"rank {self.rank}: {self.where}", f"where: {self.activity}"]
        if self.state:
            lines.append(f"state: {self.state}")
        if self.place:
            inside = f", inside {self.library}" if self.library else ""
            lines.append(f"main thread: {self.place}{inside}")
        if self.exchanges is None:
            lines.append("exchanges: unknown")
        else:
            now = time.time()
            lines.append(f"last {len(self.exchanges)} exchanges, the latest first:")
            lines += [f"  {_describe(exchange, now)}" for exchange in reversed(self.exchanges)]
        lines += ["stacks of all threads:", self.stacks.rstrip() or "  unknown"]
        return "\n".join(lines) + "\n"


def _describe(exchange: Exchange, now: float) -> str:
    if exchange.failed:
        end = "failed"
    elif exchange.done is None:
        end = f"not done for {now - exchange.begun:.1f} s"
    else:
        end = f"done in {(exchange.done - exchange.begun) * 1000:.2f} ms"
    begun = time.strftime("%H:%M:%S", time.localtime(exchange.begun))
    parts = f"{exchange.begun % 1:.4f}"[1:]
    return f"{begun}{parts} {exchange.name}, turn {exchange.turn}: {end}"


def report_this_rank(
    rank: int, where: str, activity: str, log: ExchangeLog, stack_file: StackFile
) -> RankReport:
    """Reports on this process; any thread of it may call this."""
    stacks = stack_file.dump()
    # TensorFlow may not answer: then what was collected before must do.
    collector = threading.Thread(target=log.collect, daemon=True)
    collector.start()
    collector.join(_COLLECT_SECONDS)
    exchanges, turns = log.read()
    report = RankReport(rank, where, activity, "", exchanges=exchanges, turns=turns)
    return _with_stacks(report, stacks, stack_file.path)


def _with_stacks(report: RankReport, stacks: str, path: Path) -> RankReport:
    """Returns a report with stacks from a file, and where the main thread is by them."""
    frames = main_frames(stacks, main_thread_of(path))
    return dataclasses.replace(
        report, stacks=stacks, place=describe_place(frames), library=describe_library(frames)
    )


def report_silent_rank(report: RankReport, pid: int, directory: Path) -> RankReport:
    """Looks at a rank that does not report, in a process of this machine.

    Args:
        report: Report on the rank as far as it is known.
        pid: Its process.
        directory: The directory of the job's reports.
    """
    path = job_files.stacks_path(directory, report.rank)
    if not path.exists():  # Another machine of the same name, such as a container.
        return dataclasses.replace(report, state=UNHEARD)
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_ZOMBIE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return dataclasses.replace(report, state=GONE)
    if job_files.is_stopped(pid):
        text = "A stopped process cannot write its stacks."
        return dataclasses.replace(report, state=STOPPED, stacks=text)
    if job_files.open_stacks(pid) != (report.rank, path.resolve()):
        return dataclasses.replace(report, state=UNHEARD)
    stacks, python_runs = job_files.ask(pid)
    state = NO_PYTHON if stacks and not python_runs else UNHEARD
    return _with_stacks(dataclasses.replace(report, state=state), stacks, path)
