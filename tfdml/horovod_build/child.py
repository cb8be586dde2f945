"""Child processes with output to a file, a time limit and no orphans."""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tfdml import topology
from tfdml.runtime.launch.processes import end_processes, process_tree, session_processes

# Seconds between SIGTERM and SIGKILL.
GRACE = 5.0


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """Result of a child process.

    Attributes:
        returncode: Exit code; the negative number of a signal that ended it.
        output: Standard output and standard error, interleaved.
        seconds: Run time in seconds.
        timed_out: Whether it was stopped at its time limit.
    """

    returncode: int
    output: str
    seconds: float
    timed_out: bool

    @property
    def ok(self) -> bool:
        """True if the child ended by itself, with exit code 0."""
        return self.returncode == 0 and not self.timed_out

    @property
    def lines(self) -> list[str]:
        """Non-empty lines of the output."""
        return [line for line in self.output.splitlines() if line.strip()]


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout: float,
    cwd: Path | None = None,
    log: Path | None = None,
    on_tick: Callable[[Path], None] | None = None,
    tick: float = 0.5,
    grace: float = GRACE,
) -> ChildResult:
    """Runs a command with a time limit, then ends all its remaining descendants.

    The output goes to a file, not through a pipe: a grandchild that outlives the child cannot keep
    a reader waiting.

    Args:
        command: Program and its arguments.
        environment: Complete environment of the command.
        timeout: Seconds after which it is stopped: SIGTERM, then SIGKILL.
        cwd: Working directory; this process's by default.
        log: File to append the output to; a temporary one by default.
        on_tick: Callable that receives the log's path every `tick` seconds.
        tick: Seconds between polls of the command.
        grace: Seconds between SIGTERM and SIGKILL.

    Returns:
        Result, with the output of this command only.
    """
    with tempfile.TemporaryDirectory(prefix="tfdml-") as scratch:
        path = log if log is not None else Path(scratch) / "output"
        with path.open("ab") as sink:
            start = sink.tell()
            began = time.monotonic()
            timed_out = False
            child = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                timed_out = not _wait(child, began + timeout, tick, path, on_tick)
            finally:
                # Also on KeyboardInterrupt, and also after a normal end: no orphan.
                stop(child, grace)
            seconds = time.monotonic() - began
        return ChildResult(child.returncode, _read(path.open("rb"), start), seconds, timed_out)


def ask(module: str, timeout: float) -> ChildResult:
    """Runs a module of this package in a child process, where importing TensorFlow may crash.

    Args:
        module: Name of the module.
        timeout: Seconds after which it is stopped.

    Returns:
        Result, without TensorFlow's own messages.
    """
    environment = topology.child_environment(TF_CPP_MIN_LOG_LEVEL="3")
    return run([sys.executable, "-m", module], environment=environment, timeout=timeout)


def stop(child: subprocess.Popen, grace: float = GRACE) -> None:
    """Ends a child and all its descendants: SIGTERM, `grace` seconds, then SIGKILL.

    Args:
        child: Child process, which may have ended already.
        grace: Seconds between the two signals.
    """
    family = process_tree(child.pid)[::-1]
    if child.poll() is not None:
        family = [pid for pid in family if pid != child.pid]
    # An orphaned descendant belongs to init now; it is still in the child's session.
    end_processes([*family, *session_processes(child.pid)], grace)
    child.wait()


def _wait(
    child: subprocess.Popen,
    deadline: float,
    tick: float,
    path: Path,
    on_tick: Callable[[Path], None] | None,
) -> bool:
    while time.monotonic() < deadline:
        try:
            child.wait(timeout=max(0.0, min(tick, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            if on_tick is not None:
                on_tick(path)
        else:
            return True
    return child.poll() is not None


def _read(source: IO[bytes], start: int) -> str:
    with source:
        source.seek(start)
        return source.read().decode("utf-8", errors="replace")
