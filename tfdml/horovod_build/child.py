"""Child processes that always end: output to a file, a time limit, and no orphan."""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tfdml import topology
from tfdml.runtime.processes import end_processes, session_of, tree_of

# A child that is asked to end gets this long before it is killed, in seconds.
GRACE = 5.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child process ended.

    Attributes:
        returncode: Its exit code; negative for the signal that ended it.
        output: What it wrote to standard output and error, together.
        seconds: How long it ran.
        timed_out: Whether it was stopped because its time was over.
    """

    returncode: int
    output: str
    seconds: float
    timed_out: bool

    @property
    def ok(self) -> bool:
        """Whether the child ended by itself, with exit code 0."""
        return self.returncode == 0 and not self.timed_out

    @property
    def lines(self) -> list[str]:
        """What it wrote, but for empty lines."""
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
) -> Ended:
    """Runs a command to its end, or ends it and everything it started.

    The output goes to a file and not through a pipe: a grandchild that outlives the child cannot
    keep the reader waiting.

    Args:
        command: The program and its arguments.
        environment: All its environment variables.
        timeout: Seconds after which it is stopped: SIGTERM, then SIGKILL.
        cwd: Its working directory; this process's by default.
        log: The file to append its output to; a temporary one by default.
        on_tick: Called with the log's path every `tick` seconds while the command runs.
        tick: Seconds between two looks at the command.
        grace: Seconds between SIGTERM and SIGKILL.

    Returns:
        How it ended, with the output of this command alone.
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
        return Ended(child.returncode, _read(path.open("rb"), start), seconds, timed_out)


def ask(module: str, timeout: float) -> Ended:
    """Runs a module of this package, which prints what TensorFlow says: it may break there.

    Args:
        module: Its name.
        timeout: Seconds after which it is stopped.

    Returns:
        How it ended. TensorFlow's own messages are left out.
    """
    environment = topology.child_environment(TF_CPP_MIN_LOG_LEVEL="3")
    return run([sys.executable, "-m", module], environment=environment, timeout=timeout)


def stop(child: subprocess.Popen, grace: float = GRACE) -> None:
    """Ends a child and all its descendants: SIGTERM, `grace` seconds, then SIGKILL.

    Args:
        child: The child; it may have ended already.
        grace: Seconds between the two signals.
    """
    family = tree_of(child.pid)[::-1]
    if child.poll() is not None:
        family = [pid for pid in family if pid != child.pid]
    # A descendant whose parent has ended belongs to init now: the session finds it.
    end_processes([*family, *session_of(child.pid)], grace)
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
