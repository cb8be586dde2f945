"""Files of a job's reports: where they are, and how to find and ask a process that has them open.

The job's directory has, on each machine:

    rank3.stacks                        open in rank 3, which adds its threads' stacks when asked
    report-2026-11-28T21-03-22.417/     a report
        rank3.txt                       rank 3's threads and exchanges
        summary.txt                     the first difference, by rank 0
"""

import contextlib
import os
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tfdml import topology
from tfdml.runtime.hang_report.stacks import (
    SIGNAL,
    is_in_use,
    main_thread_of,
    read_from,
    request,
)

_STACKS = re.compile(r"rank(\d+)\.stacks")
SUMMARY = "summary.txt"
_TEMPORARY = "tfdml-job-"
# Age below which a directory without a report is left alone.
_NEW_SECONDS = 3600.0
# Seconds that a process gets to write its stacks itself, and then on a signal. Its guard's threads
# look for requests twice a second.
_ANSWER_SECONDS = 1.5
_SIGNAL_SECONDS = 1.0


def new_job_directory() -> Path:
    """Returns the directory of a job's reports: where its launcher wants it, else a temporary one.

    A temporary one is made by `join_job_directory`, once the ranks are connected.
    """
    chosen = topology.job_directory()
    if chosen:
        return join_job_directory(chosen)
    return Path(tempfile.gettempdir(), f"{_TEMPORARY}{secrets.token_hex(8)}")


def join_job_directory(path: str) -> Path:
    """Makes the directory that rank 0 has chosen on this machine, or a temporary one if it cannot.

    Temporary ones of jobs that were killed, and have no report, are removed.

    Args:
        path: Path of rank 0's directory.
    """
    for other in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            _remove_abandoned(other)
    directory = Path(path)
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A name that can be guessed may be another user's.
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY))


def _remove_abandoned(directory: Path) -> None:
    """Removes a directory without a report that no process uses."""
    if directory.stat().st_mtime > time.time() - _NEW_SECONDS:
        return  # Its job may be about to begin.
    files = list(directory.iterdir())
    if all(_STACKS.fullmatch(path.name) and not is_in_use(path) for path in files):
        for path in files:
            path.unlink()
        directory.rmdir()


def stacks_path(directory: Path, rank: int) -> Path:
    """Returns the path of a rank's `StackFile`."""
    return directory / f"rank{rank}.stacks"


def new_report_name() -> str:
    """Returns the name of a report that begins now."""
    now = time.time()
    return time.strftime("report-%Y-%m-%dT%H-%M-%S", time.localtime(now)) + f"{now % 1:.3f}"[1:]


def reports(directory: Path) -> list[Path]:
    """Returns the directories of a job's reports, the oldest first."""
    return sorted(directory.glob("report-*"), key=lambda path: (path.stat().st_mtime, path.name))


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears as a whole; a full disk must not end the job."""
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(text)
        part.rename(path)
    except OSError as error:
        os.write(2, f"tfdml: cannot write a report: {error}\n".encode())


def open_stacks(pid: int) -> tuple[int, Path] | None:
    """Returns the rank of a process and its `StackFile`; None if it does not write it on `SIGNAL`.

    Such a process must not be signalled: the signal's default action ends it.
    """
    with contextlib.suppress(OSError):
        if not _catches_signal(pid):
            return None
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                path = link.readlink()
                rank = _STACKS.fullmatch(path.name)
                if rank and main_thread_of(path):
                    return int(rank[1]), path
    return None


def _catches_signal(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) & 1 << (SIGNAL - 1))


def processes_of(directory: Path) -> dict[int, int]:
    """Returns the ids of a job's processes on this machine that run, by rank."""
    found = {}
    for pid in psutil.pids():
        stacks = open_stacks(pid)
        if stacks is not None and stacks[1].parent == directory.resolve():
            found.setdefault(stacks[0], pid)  # A forked child has the file open, too.
    return dict(sorted(found.items()))


class AskedStacks(NamedTuple):
    """Answer of a process: its stacks, "" if it has none, and whether its Python runs."""

    stacks: str
    python_runs: bool


def ask(pid: int) -> AskedStacks:
    """Has a process write its stacks, and its job's guard a report.

    Only a process that does not write them itself, and is not stopped, is signalled: see `stacks`.
    """
    found = open_stacks(pid)
    if found is None:
        return AskedStacks("", False)
    begin = request(found[1])
    stacks = _wait_for_stacks(found[1], begin, _ANSWER_SECONDS)
    if stacks or is_stopped(pid) or open_stacks(pid) != found:
        return AskedStacks(stacks, bool(stacks))
    os.kill(pid, SIGNAL)
    return AskedStacks(_wait_for_stacks(found[1], begin, _SIGNAL_SECONDS), False)


def _wait_for_stacks(path: Path, begin: int, seconds: float) -> str:
    """Returns the stacks that a file has from an offset on, once they grow no more."""
    deadline = time.monotonic() + seconds
    stacks = ""
    while time.monotonic() < deadline and path.exists():
        time.sleep(0.1)
        latest = read_from(path, begin)
        if latest and latest == stacks:
            break
        stacks = latest
    return stacks


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, or gone: it cannot answer."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return True
