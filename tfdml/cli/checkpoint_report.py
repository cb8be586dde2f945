"""Reading of checkpoints for `tfdml checkpoints`: their contents, and a model file of them."""

import contextlib
import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table

from tfdml.checkpointing import Files, open_files
from tfdml.checkpointing.commit import is_committed
from tfdml.checkpointing.directory import DAMAGED, Checkpoint
from tfdml.checkpointing.manifest import DamagedCheckpoint, fit_of, verify
from tfdml.checkpointing.names import DEALT, OWN, PART
from tfdml.checkpointing.stored_tables import StoredTable
from tfdml.collectives.row_deal import RowDeal

_WEIGHTS = ".weights.h5"


def show(directory: str) -> bool:
    """Prints each checkpoint, and the contents of the newest; returns whether all are undamaged.

    Args:
        directory: Directory or URL of the checkpoints, or of one of them.

    Raises:
        typer.Exit: If it has no checkpoints.
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
    return not damaged


def export(directory: str, output: Path) -> None:
    """Writes a model file of the newest undamaged checkpoint.

    Args:
        directory: Directory or URL of the checkpoints, or of one of them.
        output: The .keras or .weights.h5 file to write.

    Raises:
        ValueError: If `output` is of another kind or in no directory, if no checkpoint is
            undamaged, or if its model needs its code.
        typer.Exit: If it has no checkpoints.
    """
    if not output.name.endswith((".keras", _WEIGHTS)):
        raise ValueError(f"`output` must end in .keras or {_WEIGHTS}. Received: {output}.")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"`output` must be in a directory that exists. Received: {output}.")
    checkpoint = _newest(directory)
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
    by_rank = [tensors for tensors, _ in checkpoint.read()]
    tables = checkpoint.tables()
    for number, variable in enumerate(model.variables):
        name = f"model/{number}"
        if name in tables:
            _assign_rows(variable, tables[name])
        else:
            variable.assign(_value(by_rank, name, tuple(variable.shape)))
    if output.name.endswith(_WEIGHTS):
        model.save_weights(output)
    else:
        model.save(output)


def _assign_rows(variable: Any, table: StoredTable) -> None:
    """Assigns a table to a variable, by blocks of rows: it is in memory once, in the model."""
    import tensorflow as tf

    for rows in table.blocks():
        update = tf.IndexedSlices(tf.constant(table[rows]), tf.range(rows.start, rows.stop))
        variable.value.scatter_update(update)


def _value(
    by_rank: Sequence[Mapping[str, np.ndarray]], name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns a variable's value, put together if the ranks have written parts of it.

    Args:
        by_rank: The tensors that each rank has written, by name.
        name: The variable's name.
        shape: The variable's shape.
    """
    for tensors in by_rank:
        if name in tensors:
            return tensors[name]
    part = f"{OWN}{PART}{name}{DEALT}"
    parts = [tensors[part] for tensors in by_rank if part in tensors]
    return RowDeal(shape, len(parts)).join(parts)


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
    for name, table in checkpoint.tables().items():
        groups.setdefault(name.split("/")[0], []).append(table.nbytes)
    inside = f"Inside {os.path.basename(checkpoint.path)}"
    table = _table(inside, "Tensors", "MB")
    for group, sizes in sorted(groups.items()):
        table.add_row(group, str(len(sizes)), f"{sum(sizes) / 1e6:.2f}")
    return table


def _table(first: str, *columns: str) -> Table:
    """Returns an empty table that does not wrap its first column, even at 80 columns."""
    return Table(Column(first, no_wrap=True), *columns, box=None, padding=(0, 2, 0, 0))
