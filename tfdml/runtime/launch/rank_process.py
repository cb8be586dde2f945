"""Processes of a job as the launcher sees them: their output, how each has ended, and in words."""

import collections
import dataclasses
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from tfdml import topology
from tfdml.runtime.immediate_exit import EXIT_CODE, PREEMPTED_EXIT_CODE
from tfdml.runtime.launch.held_errors import HeldErrors
from tfdml.runtime.startup_noise import is_noise

_LAST_LINES = 30
_CONTINUED = re.compile(r"tfdml: epoch \d+ (?:continues at step \d+|has finished), from")
# Lines of `horovodrun`, with and without a rank's prefix.
_OF_RANK = re.compile(r"\[(\d+)\]<std(?:out|err)>:(.*)")
_END_OF_RANK = re.compile(r"Process (\d+) exit with status code (\d+)\.$")
_ENDED_BY_SIGNAL = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


class RankProcess:
    """A started process of a job, as the launcher sees it.

    Args:
        label: Name in messages, such as "rank 0".
        prefix: Prefix of its output lines.
        command: Command to start on this machine: the supervisor, or ssh.
        changes: Environment variables of this process.
        terminal: Whether its standard output is a terminal, so that it shows a progress bar.

    Attributes:
        last_lines: Its last lines of output.
        continued: Epoch and step at which it resumed from a checkpoint; None without one.
        was_ended: Whether the launcher has ended it.
    """

    def __init__(
        self,
        label: str,
        prefix: str,
        command: Sequence[str],
        changes: dict[str, str],
        terminal: bool,
    ):
        self.label = label
        self._prefix = prefix
        self.last_lines = _last_lines()
        self.continued: str | None = None
        self.ended: float | None = None
        self.was_ended = False
        master, slave = pty.openpty() if terminal else (None, subprocess.PIPE)
        self._process = subprocess.Popen(
            command,
            env=topology.child_environment(**{**quiet_variables(), **changes}),
            stdin=subprocess.PIPE,
            stdout=slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [self._read_by(self._copy_lines, self._process.stderr, sys.stderr)]
        if terminal:
            os.close(slave)
            self._readers.append(self._read_by(self._copy_terminal, master))
        else:
            self._readers.append(self._read_by(self._copy_lines, self._process.stdout, sys.stdout))

    @property
    def code(self) -> int | None:
        """Exit code; None while the process runs. 128 plus the number of a signal that ended it."""
        code = self._process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code if code is None or code >= 0 else 128 - code

    @property
    def members(self) -> Sequence["RankProcess | HorovodRank"]:
        """The ranks of which this process consists, for reports: itself."""
        return [self]

    def end(self) -> None:
        """Closes the supervisor's input: it then ends the process and all its descendants."""
        self.was_ended = self.code is None
        self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Waits for the end and the last output; kills the supervisor after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def _read_by(self, target: Callable, *args: object) -> threading.Thread:
        reader = threading.Thread(target=target, args=args, daemon=True)
        reader.start()
        return reader

    def _copy_lines(self, source: IO[bytes], sink: IO[str]) -> None:
        lines = HeldErrors(lambda line: self._show(line, sink))
        for raw in source:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if not is_noise(line):
                lines.take(line)
        lines.release()

    def _show(self, line: str, sink: IO[str]) -> None:
        self.last_lines.append(line)
        self.continued = _continued(line) or self.continued
        # One call, so that lines of two ranks do not mix, however the sink is buffered.
        sink.write(f"{self._prefix}{line}\n")
        sink.flush()

    def _copy_terminal(self, master: int) -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # The other end has closed.
                return
            self.last_lines.extend(data.decode(errors="replace").splitlines())
            sys.stdout.buffer.write(data)
            sys.stdout.flush()


@dataclasses.dataclass
class HorovodRank:
    """A rank that `horovodrun` has started; the attributes are those of `RankProcess`."""

    label: str
    last_lines: collections.deque[str]
    code: int | None = None
    ended: float | None = None
    was_ended: bool = False
    continued: str | None = None


class HorovodRun(RankProcess):
    """Process of `horovodrun`, which says how each of its ranks has ended.

    Its own traceback about that is not shown: the report has the rank that failed.

    Args:
        command: Command to start on this machine.
        changes: Environment variables of `horovodrun` and its ranks on this machine.
    """

    def __init__(self, command: Sequence[str], changes: dict[str, str] | None = None):
        self._ranks: dict[int, HorovodRank] = {}
        self._is_over = False
        super().__init__("horovodrun", "", command, changes or {}, terminal=False)

    @property
    def members(self) -> Sequence[RankProcess | HorovodRank]:
        """The ranks whose end is known; `horovodrun` itself if none is."""
        return list(self._ranks.values()) if self._is_over else [self]

    def _rank(self, number: str) -> HorovodRank:
        return self._ranks.setdefault(int(number), HorovodRank(f"rank {number}", _last_lines()))

    def _show(self, line: str, sink: IO[str]) -> None:
        if found := _OF_RANK.match(line):
            rank = self._rank(found[1])
            rank.last_lines.append(found[2])
            rank.continued = _continued(line) or rank.continued
        elif found := _END_OF_RANK.match(line):
            rank, code = self._rank(found[1]), int(found[2])
            # It ends the others after the first.
            rank.was_ended = self._is_over and code in _ENDED_BY_SIGNAL
            rank.code, rank.ended = code, time.monotonic()
            self._is_over = True
            return
        elif self._is_over:
            return
        super()._show(line, sink)


def is_script_error(code: int) -> bool:
    """Returns whether an exit code is the script's own: no signal's and none of the guard's."""
    return 0 < code <= 128 and code not in (EXIT_CODE, PREEMPTED_EXIT_CODE)


def explain(failed: Sequence[RankProcess | HorovodRank]) -> str:
    """Returns the failure report: the rank to blame with its last lines, then the others."""
    first, *others = failed
    lines = [f"tfdml launch: {first.label} failed: {in_words(first)}. Its last lines:"]
    lines += [f"    {line}" for line in first.last_lines]
    lines += [f"{rank.label}: {in_words(rank)}" for rank in others]
    return "\n".join(lines)


def in_words(rank: RankProcess | HorovodRank) -> str:
    """Describes how a rank ended."""
    code = rank.code
    if rank.was_ended:
        return f"did not end by itself, and was stopped (exit code {code})"
    if code == PREEMPTED_EXIT_CODE:
        return f"was asked to end, and has saved its state (exit code {code})"
    if code == EXIT_CODE:
        return f"ended because another rank could not continue (exit code {code})"
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"exit code {code}"


def quiet_variables() -> dict[str, str]:
    """Returns variables that unbuffer a rank's output and hide TensorFlow's information lines."""
    level = topology.setting("TF_CPP_MIN_LOG_LEVEL", "2")
    return {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": level}


def _last_lines() -> collections.deque[str]:
    return collections.deque(maxlen=_LAST_LINES)


def _continued(line: str) -> str | None:
    """Returns where a rank continues, if a line of `FaultTolerantCheckpoint` says so."""
    found = _CONTINUED.search(line)
    return found and found[0]
