"""`tfdml chaos`: injects faults into a training script and checks for an identical result."""

import random
import tempfile
from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


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
    # Imported here, as in all commands: help is shown without NumPy.
    from tfdml.cli.chaos_campaign import Campaign

    with tempfile.TemporaryDirectory(prefix="tfdml-chaos-") as scratch:
        campaign = Campaign(command, Path(scratch), timeout, rank)
        try:
            lost = campaign.run(number, random.Random(seed))
        except RuntimeError as error:
            typer.echo(f"tfdml chaos: {error}", err=True)
            raise typer.Exit(2) from error
    raise typer.Exit(1 if lost else 0)
