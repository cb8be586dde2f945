"""Runs of a script under the recorder: on one process, the same again, and on several."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfdml import topology
from tfdml.runtime.launch.job_hosts import Host
from tfdml.runtime.launch.launcher import run, start_alone, start_horovod, start_workers
from tfdml.runtime.launch.rank_process import HorovodRank, RankProcess, in_words
from tfdml.verification import record
from tfdml.verification.aligning import RecordedRun
from tfdml.verification.request import Request

# How the ranks of a strategy are started.
HOROVOD, WORKERS, MIRRORED = "horovod", "multi_worker_mirrored", "mirrored"
_STARTERS = {
    "HorovodStrategy": HOROVOD,
    "MultiWorkerMirroredStrategy": WORKERS,
    "MirroredStrategy": MIRRORED,
}


class RunFailed(Exception):
    """A run of the script that failed.

    Attributes:
        processes: The number of processes of the run.
        lines: The last lines of output of the process to blame.
    """

    def __init__(self, processes: int, failed: RankProcess | HorovodRank):
        super().__init__(f"{failed.label}: {in_words(failed)}")
        self.replicas, self.lines = processes, list(failed.last_lines)

    def report(self) -> str:
        """Returns how the process ended, with its last lines."""
        return f"{self}, with:\n" + "\n".join(self.lines)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a script, whose records lie in a directory.

    Attributes:
        program: The script and its arguments.
        replicas: The number of replicas of a run on several: processes, or devices of one.
        steps: The number of steps to record.
        directory: Directory for the records.
        float64: Whether layers compute in float64.
        starter: How several processes are started; None for the way of the script's strategy.
    """

    program: Sequence[str]
    replicas: int
    steps: int
    directory: Path
    float64: bool = False
    starter: str | None = None

    def alone(self) -> RecordedRun:
        """Runs the script on one process, which writes the initial weights of all runs."""
        self._run([("one", 1, self._start_alone("one"))])
        return self._read("one")

    def again_and_several(self, one: RecordedRun) -> tuple[RecordedRun, RecordedRun]:
        """Runs the script on one process, changed in the last place, and on several.

        Args:
            one: The run on one process.
        """
        again = self._start_alone("again", perturbs=True)
        several = self._start_several("several", one)
        self._run([("again", 1, again), ("several", self.replicas, several)])
        return self._read("again"), self._read("several")

    def compressed_and_not(self, one: RecordedRun) -> tuple[RecordedRun, RecordedRun]:
        """Runs the script on several processes, with its compression and without.

        Args:
            one: The run on one process.
        """
        if not any(fact.startswith("compression=") for fact in one.facts["left_out"]):
            raise ValueError(
                "SCRIPT must pass `compression=` to its strategy for `--against none`. Received: a "
                "strategy without."
            )
        starts = [
            (name, self._start_several(name, one, compresses=name == "compressed"))
            for name in ("compressed", "uncompressed")
        ]
        # One after the other: both would use all the processors of a small machine.
        for name, start in starts:
            self._run([(name, self.replicas, start)])
        return self._read("compressed"), self._read("uncompressed")

    def _request(self, name: str, **options: int) -> dict[str, str]:
        initial = self.directory / "initial.npz"
        request = Request(
            self.directory / name, self.steps, initial, float64=self.float64, **options
        )
        return request.variables()

    def _start_alone(self, name: str, **options: int) -> Callable[[], list[RankProcess]]:
        # It gets the GPUs that one of the several processes gets.
        local = topology.local_variables(0, self.replicas)
        variables = {**self._request(name, **options), **local}
        return lambda: start_alone(self.program, sys.executable, variables)

    def _start_several(
        self, name: str, one: RecordedRun, **options: int
    ) -> Callable[[], list[RankProcess]]:
        strategy = one.facts["strategy"]
        starter = self.starter or _STARTERS.get(strategy)
        if starter is None:
            raise ValueError(
                f"SCRIPT must train under one of {', '.join(_STARTERS)}. Received: {strategy}."
            )
        if starter == MIRRORED:
            variables = self._request(name, devices=self.replicas, **options)
            return lambda: start_alone(self.program, sys.executable, variables)
        start = start_horovod if starter == HOROVOD else start_workers
        hosts, variables = [Host("localhost", self.replicas)], self._request(name, **options)
        return lambda: start(hosts, self.program, sys.executable, variables)

    def _run(self, starts: Sequence[tuple[str, int, Callable[[], list[RankProcess]]]]) -> None:
        """Runs jobs at the same time.

        Args:
            starts: Name, number of processes, and start of each job.

        Raises:
            RunFailed: If one of them fails.
        """
        with _silently():
            jobs = [(processes, start()) for _, processes, start in starts]
        failed = run([rank for _, ranks in jobs for rank in ranks])
        if failed:
            numbers = {id(m): n for n, ranks in jobs for rank in ranks for m in rank.members}
            raise RunFailed(numbers[id(failed[0])], failed[0])

    def _read(self, name: str) -> RecordedRun:
        records = record.load(self.directory / name)
        if not records or not any(r.entries for r in records):
            raise ValueError(
                f"SCRIPT must call `fit` on a model made in the scope of one of tfdml's strategies "
                f"for replicas. Received: {self.program[0]}, which ended without a train step."
            )
        return RecordedRun(records)


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Context manager: the output of processes that are started is kept, but not shown."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
