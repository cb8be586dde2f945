"""Asking a job's processes on this machine for a report, from outside of the job."""

import time
from pathlib import Path
from typing import NamedTuple

from tfdml.runtime.hang_report import job_files
from tfdml.runtime.hang_report.stacks import read_from

# Seconds in which a rank that was asked begins a report, before the next one is asked.
_BEGIN_SECONDS = 4.0


class Process(NamedTuple):
    """A process that can be asked: its rank, its id, and its stacks' file."""

    rank: int
    pid: int
    stacks: Path


class Answer(NamedTuple):
    """Answer to a request: text for people, and whether a report was concluded."""

    text: str
    is_complete: bool


def find_processes(pid: int | None, directory: Path | None) -> list[Process]:
    """Returns a job's processes on this machine, those to be asked first at the beginning.

    Args:
        pid: One of them, asked first; None to find them by the directory.
        directory: Directory of the job's reports, used if `pid` is None.

    Raises:
        ValueError: If there are none.
    """
    if pid is not None:
        found = job_files.open_stacks(pid)
        if found is None:
            raise ValueError(
                f"`--pid` must be a process of this user that trains with HorovodStrategy or "
                f"MultiWorkerMirroredStrategy on several processes, and that has made its "
                f"strategy. Received: --pid {pid}."
            )
        directory = found[1].parent
    processes = [
        Process(rank, own, job_files.stacks_path(directory, rank))
        for rank, own in job_files.processes_of(directory).items()
    ]
    if not processes:
        raise ValueError(
            f"`--job` must be the directory that `tfdml launch --job-dir` has given a job whose "
            f"ranks run on this machine. Received: --job {directory}, which no running rank uses."
        )
    return sorted(processes, key=lambda p: (job_files.is_stopped(p.pid), p.pid != pid))


def ask_in_turn(processes: list[Process], seconds: float) -> Answer:
    """Asks processes of a job one after another, until a report on it is concluded.

    Args:
        processes: The processes.
        seconds: Seconds to wait in total.

    Returns:
        The report's summary; if there is none, the stacks that the processes have written.
    """
    deadline = time.monotonic() + seconds
    directory = processes[0].stacks.parent
    known = job_files.reports(directory)
    before = {process: process.stacks.stat().st_size for process in processes}
    waiting, ask_next = list(processes), 0.0
    while (now := time.monotonic()) < deadline:
        new = [path for path in job_files.reports(directory) if path not in known]
        concluded = [path / job_files.SUMMARY for path in new]
        concluded = [path for path in concluded if path.exists()]
        if concluded:
            return Answer(concluded[0].read_text(), True)
        if waiting and not new and now >= ask_next:
            job_files.ask(waiting.pop(0).pid)
            ask_next = now + _BEGIN_SECONDS
        time.sleep(0.1)
    lines = [f"no rank has concluded a report in {seconds:.0f} s."]
    for process in processes:
        stacks = read_from(process.stacks, before[process]) if process.stacks.exists() else ""
        state = "has written its stacks:" if stacks else "has not written its stacks."
        lines += [f"rank {process.rank}, pid {process.pid}, {state}", stacks.rstrip()]
    return Answer("\n".join(filter(None, lines)) + "\n", False)
