"""`tfdml checkpoints`: shows a directory of checkpoints, and exports one as a model file."""

import contextlib
import datetime
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from tfdml.checkpointing import Files, open_files
from tfdml.checkpointing.commit import is_committed
from tfdml.checkpointing.directory import DAMAGED, Checkpoint
from tfdml.checkpointing.manifest import DamagedCheckpoint, fit_of, verify

app = typer.Typer(
    help=(
        "Inspect the checkpoints of `FaultTolerantCheckpoint`, and export them as model files.\n\n"
        "For example:\n\n"
        "`tfdml checkpoints inspect run1`\n\n"
        "`tfdml checkpoints export run1 model.keras`"
    ),
    no_args_is_help=True,
)

_WEIGHTS = ".weights.h5"

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
    files = open_files(directory)
    found = _checkpoints(files, directory)
    console, damaged = Console(highlight=False), []
    table = _table("Checkpoint", "Ranks", "MB", "Saved", "")
    newest = None
    for path in found:
        try:
            manifest = verify(files, path)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            table.add_row(os.path.basename(path), "", "", "", "damaged")
            continue
        newest = Checkpoint(files, path, manifest)
        saved = datetime.datetime.fromtimestamp(manifest.saved)
        table.add_row(
            os.path.basename(path),
            str(manifest.world_size),
            f"{manifest.bytes / 1e6:.2f}",
            saved.isoformat(" ", "minutes"),
            "finished" if manifest.finished else "whole",
        )
    console.print(table)
    if newest is not None:
        console.print()
        console.print(_contents(newest))
    for reason in damaged:
        console.print(f"damaged: {reason}", markup=False, soft_wrap=True)
    if damaged:
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
    `load_weights`, has the weights alone. With `use_ema` they are
    the trained weights, not their moving averages.
    """
    try:
        if not output.name.endswith((".keras", _WEIGHTS)):
            raise ValueError(f"`output` must end in .keras or {_WEIGHTS}. Received: {output}.")
        if not output.absolute().parent.is_dir():
            raise ValueError(f"`output` must be in a directory that exists. Received: {output}.")
        _export(_newest(directory), output)
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml checkpoints export: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{output}")


def _checkpoints(files: Files, directory: str) -> list[str]:
    directory = directory.rstrip("/")
    if fit_of(os.path.basename(directory)) is not None:
        return [directory]
    names = []
    with contextlib.suppress(NotADirectoryError):
        names = files.names(directory) if files.exists(directory) else []
    names = [n for n in names if fit_of(n.removeprefix(DAMAGED)) is not None]
    found = [os.path.join(directory, name) for name in names]
    found = [path for path in found if is_committed(files, path)]
    if not found:
        typer.echo(
            f"tfdml checkpoints: `directory` must have checkpoints. Received: {directory}.",
            err=True,
        )
        raise typer.Exit(2)
    return found


def _newest(directory: str) -> Checkpoint:
    files = open_files(directory)
    for path in reversed(_checkpoints(files, directory)):
        try:
            return Checkpoint(files, path, verify(files, path))
        except DamagedCheckpoint as error:
            typer.echo(f"skipped, because it is damaged: {error}", err=True)
    raise ValueError(f"`directory` must have an undamaged checkpoint. Received: {directory}.")


def _contents(checkpoint: Checkpoint) -> Table:
    """Returns a table of a checkpoint's tensors, grouped by the first part of their names."""
    groups: dict[str, list[int]] = {}
    for tensors, _ in checkpoint.read():
        for name, array in tensors.items():
            parts = name.split("/")
            group = "/".join(parts[:2]) if parts[0] == "rank" else parts[0]
            groups.setdefault(group, []).append(array.nbytes)
    inside = f"Inside {os.path.basename(checkpoint.path)}"
    table = _table(inside, "Tensors", "MB")
    for group, sizes in sorted(groups.items()):
        table.add_row(group, str(len(sizes)), f"{sum(sizes) / 1e6:.2f}")
    return table


def _table(first: str, *columns: str) -> Table:
    """Returns an empty table that does not wrap its first column, even at 80 columns."""
    return Table(Column(first, no_wrap=True), *columns, box=None, padding=(0, 2, 0, 0))


def _export(checkpoint: Checkpoint, output: Path) -> None:
    layout = checkpoint.manifest.state["layout"]
    if layout["architecture"] is None:
        raise ValueError(
            "The model must have a configuration to be exported without its code. Received: a "
            "model of a custom class without `get_config`. Run the training script with the "
            "checkpoint's directory instead, and call `model.save`."
        )
    # Imported here because it takes seconds, and inspecting checkpoints does not need it.
    import keras

    model = keras.models.model_from_json(layout["architecture"])
    tensors = {k: v for part, _ in checkpoint.read() for k, v in part.items()}
    for number, variable in enumerate(model.variables):
        variable.assign(tensors[f"model/{number}"])
    if output.name.endswith(_WEIGHTS):
        model.save_weights(output)
    else:
        model.save(output)
