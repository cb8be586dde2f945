"""Times the loss of a rank: from its death to the next step that the others have trained.

    .venv/bin/python tools/bench_recovery.py

Two ranks of this machine train the same small network; one kills itself, three times each:

- `tfdml.elastic`, in memory: `fit` goes on in the process of the other rank;
- Horovod Elastic's own loop, without Keras: `hvd.elastic.run` around a loop with a gradient tape;
- by restart: `tfdml launch --max-restarts` starts both again, `FaultTolerantCheckpoint` resumes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_job import conditions

ROOT = Path(__file__).resolve().parents[1]
RANK = str(ROOT / "tools" / "bench_recovery_rank.py")
LIMIT_SECONDS = 150.0
WAYS = {
    "fit": "`tfdml.elastic`, in memory",
    "loop": "Horovod Elastic's own loop",
    "restart": "`tfdml launch --max-restarts`",
}


def command(way: str, scratch: Path) -> list[str]:
    """Returns what runs a job of two ranks."""
    program = [RANK, way, str(scratch)]
    if way == "restart":
        launch = ["-m", "tfdml.cli.main", "launch", "--workers", "2", "--max-restarts", "1"]
        return [sys.executable, *launch, *program]
    # Two names of this machine: with a rank Horovod takes its whole host for lost.
    script = scratch / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    script.chmod(0o755)
    return [
        sys.executable, str(Path(sys.executable).with_name("horovodrun")),
        "-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script),
        "--network-interface", "lo", sys.executable, *program,
    ]  # fmt: skip


def recovery(way: str) -> float:
    """Returns the seconds from a rank's death to the other's next step."""
    scratch = Path(tempfile.mkdtemp())
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    try:
        done = subprocess.run(
            command(way, scratch),
            env=environment,
            timeout=LIMIT_SECONDS,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{way} must end well. Received:\n{done.stderr[-3000:]}")
        death = json.loads((scratch / "death").read_text())
        steps = json.loads((scratch / "steps").read_text())
        return min(step for step in steps if step > death) - death
    finally:
        shutil.rmtree(scratch)


def main(
    times: Annotated[int, typer.Option(min=1, help="How often a rank is lost, each way.")] = 3,
) -> None:
    """Prints the table."""
    print(f"Measured with {conditions()}.\n")
    print("| two ranks, one is killed | seconds to the next step: median | each |\n|---|---|---|")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(times):
        for way in WAYS:
            seconds[way].append(recovery(way))
    for way, name in WAYS.items():
        each = ", ".join(f"{s:.1f}" for s in seconds[way])
        print(f"| {name} | {statistics.median(seconds[way]):.1f} | {each} |")


if __name__ == "__main__":
    typer.run(main)
