"""`tfdml checkpoints`: what is in a directory of checkpoints."""

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tfdml.checkpointing.directory import Checkpoint
from tfdml.checkpointing.manifest import DamagedCheckpoint, fit_of, verify

app = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)

_Directory = Annotated[
    Path, typer.Argument(help="Of `FaultTolerantCheckpoint`, or one checkpoint in it.")
]


@app.callback()
def _group() -> None:
    """Look at checkpoints."""


@app.command()
def inspect(directory: _Directory) -> None:
    """Show each checkpoint: where training was, how many ranks wrote it, whole or damaged.

    All files are read and checked. The exit code is 1 if a checkpoint is damaged.
    """
    found = _checkpoints(directory)
    console, damaged = Console(highlight=False), []
    table = Table("Checkpoint", "Fit", "Epoch", "Step", "Ranks", "MB", "Saved", "")
    newest = None
    for path in found:
        try:
            manifest = verify(str(path))
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            table.add_row(path.name, *[""] * 6, "damaged")
            continue
        newest = Checkpoint(str(path), manifest)
        saved = datetime.datetime.fromtimestamp(manifest.saved)
        table.add_row(
            path.name,
            *map(str, (manifest.fit, manifest.epoch, manifest.state["step"], manifest.world_size)),
            f"{manifest.bytes / 1e6:.2f}",
            saved.isoformat(" ", "seconds"),
            "whole, fit finished" if manifest.finished else "whole",
        )
    console.print(table)
    if newest is not None:
        console.print(_contents(newest))
    for reason in damaged:
        console.print(f"damaged: {reason}", markup=False, soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


def _checkpoints(directory: Path) -> list[Path]:
    if fit_of(directory.name) is not None:
        return [directory]
    found = [p for p in directory.glob("*") if fit_of(p.name.removeprefix("damaged-")) is not None]
    if not found:
        typer.echo(
            f"tfdml checkpoints: `directory` must have checkpoints. Received: {directory}.",
            err=True,
        )
        raise typer.Exit(2)
    return sorted(found)


def _contents(checkpoint: Checkpoint) -> Table:
    """Returns a table of what a checkpoint holds, by the first part of the tensors' names."""
    groups: dict[str, list[int]] = {}
    for tensors, _ in checkpoint.read():
        for name, array in tensors.items():
            parts = name.split("/")
            group = "/".join(parts[:2]) if parts[0] == "rank" else parts[0]
            groups.setdefault(group, []).append(array.nbytes)
    table = Table("Inside", "Tensors", "MB", title=Path(checkpoint.path).name)
    for group, sizes in sorted(groups.items()):
        table.add_row(group, str(len(sizes)), f"{sum(sizes) / 1e6:.2f}")
    return table
