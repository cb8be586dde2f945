"""Times the loss of a rank: from its death to the next step that the others have trained.

    python -m tools.bench.recovery --times 3

Two ranks of this machine train the same small network; one kills itself, three times each:

- `tfdml.elastic`, in memory: `fit` continues in the process of the other rank;
- Horovod Elastic's own loop, without Keras: `hvd.elastic.run` around a loop with a gradient tape;
- by restart: `tfdml launch --max-restarts` starts both again, `FaultTolerantCheckpoint` resumes.
"""

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.harness import conditions, environment, finish, horovodrun, module_command, start

RANK = "tools.bench.recovery.rank"
LIMIT_SECONDS = 150.0
WAYS = {
    "fit": "`tfdml.elastic`, in memory",
    "loop": "Horovod Elastic's own loop",
    "restart": "`tfdml launch --max-restarts`",
}


def command(way: str, scratch: Path) -> list[str]:
    """Returns the command that runs a job of two ranks."""
    if way == "restart":
        launch = module_command("tfdml.cli.main", "launch", "--workers", "2", "--max-restarts", "1")
        return [*launch, "--", "-m", RANK, way, str(scratch)]
    # Two names of this machine: when a rank is lost, Horovod counts its whole host as lost.
    script = scratch / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    script.chmod(0o755)
    options = ["-np", "2", "--min-np", "1", "--max-np", "2", "--network-interface", "lo"]
    elastic = horovodrun(*options, "--host-discovery-script", str(script))
    return [*elastic, *module_command(RANK, way, str(scratch))]


def recovery(way: str) -> float:
    """Returns the seconds from a rank's death to the other's next step."""
    scratch = Path(tempfile.mkdtemp())
    try:
        finish(command(way, scratch), environment(1), LIMIT_SECONDS)
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
    start(__doc__, main)
