"""Reliable termination of processes: SIGTERM, then SIGKILL for those that outlive it."""

import contextlib
import os
from collections.abc import Callable, Iterable

import psutil


def end_processes(pids: Iterable[int], term_seconds: float) -> list[int]:
    """Ends processes and waits until they are gone.

    Args:
        pids: Process ids; the caller must own them.
        term_seconds: Seconds between SIGTERM and SIGKILL.

    Returns:
        Ids of the processes that had to be killed.
    """
    processes = []
    for pid in dict.fromkeys(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=term_seconds)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=term_seconds)
    return [process.pid for process in alive]


def process_tree(pid: int) -> list[int]:
    """Returns `pid` and its living descendants; [] if it is gone."""
    try:
        process = psutil.Process(pid)
        return [pid, *(p.pid for p in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def session_processes(leader: int) -> list[int]:
    """Returns the processes of the session led by `leader`, without the leader."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != leader and os.getsid(pid) == leader:
                members.append(pid)
    return members


def alive(pids: Iterable[int]) -> list[int]:
    """Returns the processes that still run; zombies do not."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


def exit_code(returncode: int) -> int:
    """Returns the shell exit code of a `subprocess` return code: 128 + N for signal N."""
    return 128 - returncode if returncode < 0 else returncode


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # It may have ended in the meantime.
        send()
