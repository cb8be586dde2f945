"""Campaign of `tfdml chaos`: runs of a program with faults, compared to the one without."""

import collections
import json
import random
import shutil
import sys
import time
from pathlib import Path

import psutil
import typer

from tfdml.checkpointing import chaos as faults
from tfdml.checkpointing.chaos import Fault, FaultPlan
from tfdml.horovod_build import child
from tfdml.topology import child_environment

# Maximum number of faults in a run, after which it runs to its end undisturbed.
_FAULTS_OF_A_RUN = 5


class Campaign:
    """Runs of a program with and without faults.

    Args:
        command: Command that starts the program.
        scratch: Directory for its checkpoints.
        timeout: Seconds that one start may take.
        rank: Rank that gets the faults.
    """

    def __init__(self, command: list[str], scratch: Path, timeout: float, rank: int):
        self._command = [sys.executable if c == "python" else c for c in command]
        self._scratch, self._timeout, self._rank = scratch, timeout, rank

    def run(self, number: int, numbers: random.Random) -> int:
        """Runs the program until it has had `number` faults; returns the number of lost runs.

        Raises:
            RuntimeError: If the program fails without faults, or does not save.
        """
        whole = self._scratch / "whole"
        began = time.monotonic()
        ended = self._start(FaultPlan(str(whole)))
        if not ended.ok or not whole.exists():
            raise RuntimeError(
                f"COMMAND must succeed, and save with `FaultTolerantCheckpoint`. Received: exit "
                f"code {ended.returncode}, {'no' if not whole.exists() else 'a'} directory.\n"
                f"{ended.output[-2000:]}"
            )
        took = int(1000 * (time.monotonic() - began))
        counts = json.loads(Path(f"{whole}.counts").read_text(encoding="utf-8"))
        typer.echo(f"without faults: {counts['step']} steps, {counts['operation']} operations")
        done, lost, run = 0, 0, 0
        kinds: collections.Counter[str] = collections.Counter()
        while done < number:
            run += 1
            directory = self._scratch / f"run-{run}"
            planned = [
                faults.random_fault(numbers, counts, took // 4)
                for _ in range(min(_FAULTS_OF_A_RUN, number - done))
            ]
            happened, reason = self._run(directory, planned, str(whole))
            done += max(len(happened), 1)
            kinds.update(f"{f.kind}, {f.where}" for f in happened)
            lost += bool(reason)
            words = "; ".join(f"{f.kind} at {f.where} {f.number}" for f in happened)
            typer.echo(f"run {run}: {words or 'no fault'}: {reason or 'bit-identical'}")
            shutil.rmtree(directory, ignore_errors=True)
        for kind, count in sorted(kinds.items()):
            typer.echo(f"{count:5d} {kind}")
        typer.echo(f"{sum(kinds.values())} faults in {run} runs, {lost} runs lost")
        return lost

    def _run(
        self, directory: Path, planned: list[Fault], whole: str
    ) -> tuple[list[Fault], str | None]:
        """Runs the program with faults to its end.

        Returns:
            The faults that happened, and the reason if the run is lost, otherwise None.
        """
        happened = []
        for fault in planned:
            if fault.where == "between":
                if directory.exists() and faults.damage(str(directory), fault):
                    happened.append(fault)
                continue
            ended = self._start(FaultPlan(str(directory), fault, self._rank))
            if ended.timed_out:
                return [*happened, fault], f"did not end within {self._timeout:.0f} s"
            if ended.ok and fault.kind != "short write":
                break  # The run was over before its fault.
            happened.append(fault)
        ended = self._start(FaultPlan(str(directory)))
        if not ended.ok:
            return happened, f"the restart failed: {ended.output[-1500:]}"
        different = faults.differences(whole, str(directory))
        return happened, f"different: {', '.join(different[:5])}" if different else None

    def _start(self, plan: FaultPlan) -> child.ChildResult:
        environment = child_environment(**{faults.VARIABLE: plan.to_json()})
        return child.run(
            self._command,
            environment=environment,
            timeout=self._timeout,
            on_tick=lambda _: kill_stopped(),
            grace=0.5,
        )


def kill_stopped() -> None:
    """Kills this process's descendants that are stopped (SIGSTOP), as on a machine that hangs."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
        except psutil.NoSuchProcess:
            continue
