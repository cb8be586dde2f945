"""Runs jobs of real processes for fault tests, with a time limit, and finds leftovers."""

import dataclasses
import re
import sys
import time
from pathlib import Path

import psutil

from tests.tools.test_netlab import NETLAB
from tfdml.horovod_build import child
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("fault_program.py")


@dataclasses.dataclass(frozen=True)
class Finished:
    """Outcome of a job.

    Attributes:
        code: Exit code of the launcher.
        output: Output of all ranks and of the launcher.
        seconds: Seconds from the fault to the end; from the start if there was no fault.
        left: Processes that outlived it.
    """

    code: int
    output: str
    seconds: float
    left: list[int]

    @property
    def message(self) -> str:
        """The guard's first message, its lines joined; "" if there is none."""
        lines = [re.sub(r"^\[\d+\](<\w+>:)? ?", "", line) for line in self.output.splitlines()]
        begins = [i for i, line in enumerate(lines) if line.startswith("tfdml: the job ends")]
        return "\n".join(lines[begins[0] : begins[0] + 8]) if begins else ""


def run_job(tmp_path: Path, kind: str, size: int, *arguments: object, timeout: float = 400):
    """Runs the fault program on real ranks with `tfdml launch`.

    Args:
        tmp_path: Directory of this job only, by which its processes are found.
        kind: "horovod" or "multi_worker".
        size: Number of ranks.
        *arguments: Arguments of the program.
        timeout: Seconds until everything is ended.
    """
    command = [sys.executable, "-m", "tfdml.cli.main", "launch", "--workers", str(size)]
    if kind == "horovod":
        command.append("--horovod")
    return _run([*command, str(PROGRAM)], tmp_path, kind, *arguments, timeout=timeout)


def run_on_hosts(tmp_path: Path, ranks: str, *arguments: object, timeout: float = 200):
    """Runs the fault program on real ranks of Horovod, on two hosts of the network lab.

    Args:
        tmp_path: Directory of this job only, by which its processes are found.
        ranks: Ranks of each host, such as "2,1".
        *arguments: Arguments of the program.
        timeout: Seconds until everything is ended.
    """
    command = [sys.executable, f"{NETLAB}.py", "--hosts", "2", "--ranks", ranks, "--job", "horovod"]
    command += ["--", sys.executable, str(PROGRAM)]
    return _run(command, tmp_path, "horovod", *arguments, timeout=timeout)


def _run(command: list[str], tmp_path: Path, *arguments: object, timeout: float) -> Finished:
    command = [*command, str(tmp_path), *map(str, arguments)]
    environment = child_environment(PYTHONPATH=str(PROGRAM.parents[3]), TF_NUM_INTRAOP_THREADS="1")
    ended = child.run(command, environment=environment, timeout=timeout)
    marks = list(tmp_path.glob("fault*"))
    begun = min((float(m.read_text()) for m in marks), default=time.time() - ended.seconds)
    code = 124 if ended.timed_out else ended.returncode
    return Finished(code, ended.output, time.time() - begun, left_of(tmp_path))


def left_of(tmp_path: Path) -> list[int]:
    """Returns the processes that were started with this directory among their arguments."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(tmp_path) in argument for argument in arguments
        ):
            found.append(process.pid)
    return found
