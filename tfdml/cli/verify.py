"""`tfdml verify`: does a script train the same on one process and on several?"""

import enum
import tempfile
from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


class Starter(str, enum.Enum):
    """Names accepted by `--strategy`."""

    MULTI_WORKER_MIRRORED = "multi_worker_mirrored"
    HOROVOD = "horovod"
    MIRRORED = "mirrored"


class Against(str, enum.Enum):
    """Names accepted by `--against`."""

    NONE = "none"


def verify(
    program: Annotated[
        list[str],
        typer.Argument(help="The training script and its arguments.", metavar="SCRIPT [ARGS]..."),
    ],
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "-n",
            min=2,
            help="Number of processes, or devices of MirroredStrategy, to compare with one.",
        ),
    ] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of train steps to compare.")] = 5,
    float64: Annotated[
        bool, typer.Option("--float64", help="Compute in float64, in which rounding hides less.")
    ] = False,
    strategy: Annotated[
        Starter | None,
        typer.Option(help="Start processes for this strategy.", show_default="that of the script"),
    ] = None,
    against: Annotated[
        Against | None,
        typer.Option(help="Instead, compare the script's compression with no compression."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the answer to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Compare a script's first steps on one process and on several; name what differs, and why.

    For example:

    `tfdml verify train.py`

    `tfdml verify -n 4 --steps 10 --json answer.json train.py --batch 256`

    `tfdml verify --against none train.py`

    The script runs unchanged, three times: on one process, on one again with inputs and initial
    weights changed in the last place, and on several. After the steps of its first `fit`, each run
    ends. Rows, outputs of layers, losses, gradients before and after their exchange, learning
    rates, weights and metrics are compared in the order in which they are computed; what differs by
    more than 10 times the change in the last place is an error. The first such tensor is named,
    with its cause and what to change.

    All runs start from the same weights, and random numbers of Keras's layers, as in Dropout, are
    drawn for each row by itself. Steps run eagerly. Compression, sharding and local updates are
    left out, callbacks that write files, and the rounding of mixed precision, whose layers compute
    in float32. `--against none` shows instead, weight by weight, how far the updates of a script's
    codec are from uncompressed ones.

    The exit code is 0 if the script trains the same, 1 if it does not, and 2 if it cannot be
    compared.
    """
    import json as encoder

    from rich.console import Console

    from tfdml.verification.answers import answer_of, updates_of
    from tfdml.verification.runs import Runs

    script = program[0]
    console = Console(highlight=False, soft_wrap=True)
    try:
        if not Path(script).is_file():
            raise ValueError(f"SCRIPT must be a file. Received: {script}, which does not exist.")
        if json is not None and not json.parent.is_dir():
            raise ValueError(f"`--json` must be in a directory that exists. Received: {json}.")
        with tempfile.TemporaryDirectory(prefix="tfdml-verify-") as directory:
            starter = strategy.value if strategy else None
            runs = Runs(program, workers, steps, Path(directory), float64, starter)
            answer = (updates_of if against else answer_of)(runs, console)
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml verify: {error}", err=True)
        raise typer.Exit(2) from error
    if json is not None:
        json.write_text(encoder.dumps(answer, indent=1) + "\n", encoding="utf-8")
    if not answer["same"]:
        raise typer.Exit(1)
