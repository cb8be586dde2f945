"""Ending processes that a test started: SIGTERM first, SIGKILL for those that outlive it."""

import contextlib
from collections.abc import Iterable

import psutil

TERM_SECONDS = 3.0


def tree_of(pid: int) -> list[int]:
    """Returns `pid` and all its descendants that are alive."""
    try:
        process = psutil.Process(pid)
        return [pid, *(p.pid for p in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def end_processes(pids: Iterable[int], term_seconds: float = TERM_SECONDS) -> list[int]:
    """Ends processes and waits until they are gone.

    Args:
        pids: The processes, each one started by this test run.
        term_seconds: Seconds between SIGTERM and SIGKILL.

    Returns:
        Those that had to be killed.
    """
    processes = []
    for pid in dict.fromkeys(pids):
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=term_seconds)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=term_seconds)
    return [process.pid for process in alive]


def alive(pids: Iterable[int]) -> list[int]:
    """Returns the processes that still run (a zombie does not)."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            continue
    return running


def _signal(send) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # It may end by itself between two looks.
        send()
