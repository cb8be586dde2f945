"""Run of Keras's tests on the processes of a job, restarted when a test ends the job."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tfdml.runtime.launch.processes import end_processes, process_tree

RANK_PROGRAM = Path(__file__).with_name("rank.py")
# Seconds that the other ranks get to end a test with the same outcome.
LAG = 20.0
# Seconds until the first test begins.
START_SECONDS = 300.0
# Seconds between SIGTERM and SIGKILL.
TERM_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a test.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        message: End of the traceback, or the reason why the job was ended.
    """

    outcome: str
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """Processes that run the same tests.

    Attributes:
        python: Python that runs them.
        strategy: "plain", "mirrored", "horovod" or "multi_worker".
        replicas: Number of replicas.
        silence: Seconds without the start or end of a test after which the job counts as hung.
    """

    python: Path
    strategy: str
    replicas: int
    silence: float = 300.0

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.replicas if self.strategy in ("horovod", "multi_worker") else 1

    @property
    def command(self) -> list[str]:
        """Command that starts the processes."""
        program = [str(self.python), str(RANK_PROGRAM)]
        size = str(self.replicas)
        if self.strategy == "horovod":
            # From the calling Python's directory: the tests' environment has no `horovodrun`.
            horovodrun = Path(sys.executable).with_name("horovodrun")
            return [str(horovodrun), "-np", size, *program]
        if self.strategy == "multi_worker":
            launch = [str(self.python), "-m", "tfdml.cli.main", "launch", "--workers", size]
            return [*launch, str(RANK_PROGRAM)]
        return program

    def run(self, tests: Sequence[str]) -> dict[str, Outcome]:
        """Runs tests; returns their outcomes.

        Args:
            tests: Folders and files in `keras/src`, or tests in them, as pytest names them.
        """
        outcomes: dict[str, Outcome] = {}
        while True:
            with tempfile.TemporaryDirectory(prefix="keras-suite-") as directory:
                attempt = _Attempt(self, Path(directory), tests, sorted(outcomes))
                found, cause = attempt.watch()
            outcomes.update(found)
            if cause is None:
                return outcomes
            test, message = cause
            if test is None:
                raise RuntimeError(f"The job ended before its first test. It printed:\n{message}")
            outcomes[test] = Outcome("failed", message)


class _Attempt:
    """One start of a job.

    Args:
        job: Job to start.
        directory: Directory that its ranks write to.
        tests: Tests to run.
        done: Tests to skip.
    """

    def __init__(self, job: Job, directory: Path, tests: Sequence[str], done: Sequence[str]):
        self._job = job
        self._directory = directory
        self._sizes: dict[int, int] = {}
        self._ends: dict[str, dict[int, Outcome]] = {}
        self._begun: dict[int, str | None] = {}
        run = {
            "strategy": job.strategy,
            "replicas": job.replicas,
            "tests": list(tests),
            "done": list(done),
        }
        file = directory / "run.json"
        file.write_text(json.dumps(run))
        self._environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "KERAS_SUITE": str(file),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def watch(self) -> tuple[dict[str, Outcome], tuple[str | None, str] | None]:
        """Runs the job; returns the outcomes on which all ranks agree, and why it ended early.

        The latter is a test, or None if it was not a test, and a message.
        """
        output = self._directory / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                self._job.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            cause = self._wait(process)
            end_processes(process_tree(process.pid), TERM_SECONDS)
            process.wait()
        if cause is not None:
            tail = output.read_text(errors="replace")[-3000:]
            cause = (cause[0], f"{cause[1]}\nThe job printed: ...{tail}")
        agreed = {
            test: max(ends.values(), key=lambda end: end.outcome == "failed")
            for test, ends in self._ends.items()
            if len(ends) == self._job.processes and (cause is None or test != cause[0])
        }
        return agreed, cause

    def _wait(self, process: subprocess.Popen) -> tuple[str | None, str] | None:
        heard = time.monotonic()
        while True:
            ended = process.poll() is not None
            if self._read():
                heard = time.monotonic()
            if ended:
                return self._cause_of_end(process.returncode)
            silent = time.monotonic() - heard
            parted = self._parted(silent > min(LAG, self._job.silence))
            if parted is not None:
                return parted, self._outcomes_of_ranks(parted)
            limit = self._job.silence if self._ends or self._under_way else START_SECONDS
            if silent > limit:
                return self._under_way, f"Nothing happened for {limit:.0f} s."
            time.sleep(0.2)

    def _cause_of_end(self, exit_code: int) -> tuple[str | None, str] | None:
        """Returns the cause of a job's early end."""
        parted = self._parted(waits=True)
        if parted is not None:
            return parted, self._outcomes_of_ranks(parted)
        if self._under_way is not None or not self._begun:
            return self._under_way, f"The job ended, with exit code {exit_code}."
        return None

    def _outcomes_of_ranks(self, test: str) -> str:
        """Returns each rank's outcome of a test as text."""
        lines = ["The ranks parted."]
        for rank in range(self._job.processes):
            end = self._ends[test].get(rank)
            how = "has not ended it" if end is None else f"{end.outcome} {end.message[-1500:]}"
            lines.append(f"Rank {rank}: {how}")
        return "\n".join(lines)

    @property
    def _under_way(self) -> str | None:
        """Returns a test that a rank has begun and not ended, None if none."""
        return next((test for test in self._begun.values() if test is not None), None)

    def _parted(self, waits: bool) -> str | None:
        """Returns a test whose outcome differs between ranks, None if none.

        Args:
            waits: Whether ranks that have not ended it count as different.
        """
        for test, ends in self._ends.items():
            unlike = len({end.outcome for end in ends.values()}) > 1
            if unlike or (waits and len(ends) < self._job.processes):
                return test
        return None

    def _read(self) -> bool:
        """Reads the ranks' files; returns whether they have anything new."""
        news = False
        for rank in range(self._job.processes):
            file = self._directory / f"rank_{rank}.jsonl"
            if not file.exists():
                continue
            text = file.read_text()
            whole = text[: text.rfind("\n") + 1]
            fresh = whole[self._sizes.get(rank, 0) :]
            self._sizes[rank] = len(whole)
            for line in fresh.splitlines():
                news = True
                self._take(rank, json.loads(line))
        return news

    def _take(self, rank: int, event: dict) -> None:
        if "collected" in event:
            self._begun.setdefault(rank, None)
        elif "begins" in event:
            self._begun[rank] = event["test"]
        else:
            self._begun[rank] = None
            ends = self._ends.setdefault(event["test"], {})
            ends[rank] = Outcome(event["outcome"], event["message"])
