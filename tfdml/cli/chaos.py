"""`tfdml chaos`: injects faults into a training script and checks for an identical result."""

import collections
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from tfdml.checkpointing import chaos as faults
from tfdml.checkpointing.chaos import Fault, FaultPlan
from tfdml.horovod_build import child
from tfdml.topology import child_environment

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
# Maximum number of faults in a run, after which it runs to its end undisturbed.
_FAULTS_OF_A_RUN = 5


def chaos(
    command: Annotated[
        list[str],
        typer.Argument(help="The command that starts the training.", metavar="COMMAND..."),
    ],
    number: Annotated[int, typer.Option("--faults", min=1, help="Number of faults.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the random faults.")] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one start of the command may take.")
    ] = 600.0,
    rank: Annotated[int, typer.Option(min=0, help="Rank that gets the faults.")] = 0,
) -> None:
    """Kill and disturb a training script at many points, and check that nothing is lost.

    For example:

    `tfdml chaos --faults 5 python train.py`

    `tfdml chaos --seed 1 -- tfdml launch --workers 2 train.py`

    The script must use `FaultTolerantCheckpoint`, and seeds (`keras.utils.set_random_seed`). It is
    run once without faults. Then it is run repeatedly, with its checkpoints in a separate
    directory, with faults at random points: SIGKILL, SIGTERM, SIGSTOP and power failures at an
    operation on files, after a step, while restoring or at any time; full disks, I/O errors and
    short writes; flipped bits and truncation of checkpoints. After each fault the same command is
    restarted. In the end weights, optimizer, metrics and history must be bit-identical to those
    without faults, and no partial checkpoint may remain. The exit code is 1 otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="tfdml-chaos-") as scratch:
        runner = _Runner(command, Path(scratch), timeout, rank)
        try:
            lost = runner.campaign(number, random.Random(seed))
        except RuntimeError as error:
            typer.echo(f"tfdml chaos: {error}", err=True)
            raise typer.Exit(2) from error
    raise typer.Exit(1 if lost else 0)


class _Runner:
    """Runner that starts the program with and without faults."""

    def __init__(self, command: list[str], scratch: Path, timeout: float, rank: int):
        self._command = [sys.executable if c == "python" else c for c in command]
        self._scratch, self._timeout, self._rank = scratch, timeout, rank

    def campaign(self, number: int, numbers: random.Random) -> int:
        """Runs the program until it has had `number` faults; returns the number of lost runs."""
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

    def _start(self, plan: FaultPlan) -> child.Ended:
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
