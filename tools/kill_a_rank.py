"""Runs a job of workers and kills one of its ranks in the middle, as a machine that fails would.

python tools/kill_a_rank.py --checkpoints run1 --step 400 -- \
    tfdml launch --workers 2 --max-restarts 1 train.py --checkpoint run1

The rank gets SIGKILL as soon as the first checkpoint of that step or a later one is there. The exit
code is the job's, or 1 if the job ended before.
"""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

_STEP = re.compile(r"fit-\d+-epoch-\d+-step-(\d+)")


def newest_step(directory: Path) -> int:
    """Returns the step of the newest checkpoint, 0 if none exists."""
    found = [_STEP.fullmatch(path.name) for path in directory.glob("fit-*")]
    return max((int(match[1]) for match in found if match), default=0)


def process_of(rank: int, job: int) -> psutil.Process | None:
    """Returns the process of a rank: the innermost with its `TF_CONFIG`.

    Args:
        rank: Index of the worker.
        job: Process id of `tfdml launch`.
    """
    found = None
    for process in psutil.Process(job).children(recursive=True):
        try:
            config = json.loads(process.environ().get("TF_CONFIG", "{}"))
            runs_tensorflow = process.num_threads() > 8
        except (psutil.Error, ValueError):
            continue
        if config.get("task", {}).get("index") == rank and runs_tensorflow:
            found = process
    return found


def main(
    command: Annotated[list[str], typer.Argument(help="Starts the job: tfdml launch ...")],
    checkpoints: Annotated[Path, typer.Option(help="Where the job saves.")],
    step: Annotated[int, typer.Option(min=1, help="Kill at the first checkpoint from here on.")],
    rank: Annotated[int, typer.Option(min=0, help="The rank that is killed.")] = 1,
) -> None:
    """Run a job, and kill one of its ranks in the middle."""
    job = subprocess.Popen(command)
    while newest_step(checkpoints) < step and job.poll() is None:
        time.sleep(0.02)
    victim = process_of(rank, job.pid) if job.poll() is None else None
    if victim is not None:
        victim.kill()
        typer.echo(
            f"-- kill -9 {victim.pid}: rank {rank}, after step {newest_step(checkpoints)} --"
        )
    code = job.wait()
    if victim is None:
        typer.echo(f"error: the job ended before step {step}, exit code {code}", err=True)
        raise typer.Exit(code or 1)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
