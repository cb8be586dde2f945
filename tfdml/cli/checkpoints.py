"""`tfdml checkpoints`: shows a directory of checkpoints, and exports one as a model file."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help=(
        "Inspect the checkpoints of `FaultTolerantCheckpoint`, and export them as model files.\n\n"
        "For example:\n\n"
        "`tfdml checkpoints inspect run1`\n\n"
        "`tfdml checkpoints export run1 model.keras`"
    ),
    no_args_is_help=True,
)

_Directory = Annotated[
    str, typer.Argument(help="The directory or URL of the checkpoints, or of one of them.")
]


@app.command()
def inspect(directory: _Directory) -> None:
    """Show each checkpoint: its place in training, the number of ranks, and whether it is damaged.

    For example:

    `tfdml checkpoints inspect run1`

    `tfdml checkpoints inspect run1/fit-000-epoch-0002-step-0000000010`

    A checkpoint's name has the fit, the epoch and the step. "finished" marks an undamaged one of
    the end of a fit. All files are read and checked; the exit code is 1 if one is damaged.
    """
    from tfdml.cli.checkpoint_report import show

    if not show(directory):
        raise typer.Exit(1)


@app.command()
def export(
    directory: _Directory,
    output: Annotated[Path, typer.Argument(help="The .keras or .weights.h5 file to write.")],
) -> None:
    """Make a .keras file, or one of weights, from the newest undamaged checkpoint.

    For example:

    `tfdml checkpoints export run1 model.keras`

    `tfdml checkpoints export run1/fit-000-epoch-0001-step-0000000005 early.keras`

    The file has the model and its weights, without the optimizer's state; a .weights.h5 file, for
    `load_weights`, has the weights alone. With `use_ema` they are the trained weights, not their
    moving averages.
    """
    from tfdml.cli import checkpoint_report

    try:
        checkpoint_report.export(directory, output)
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml checkpoints export: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{output}")
