"""Printable table of the placement of variables on servers."""

from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import tensorflow as tf


def placement_table(
    placed: Sequence[tuple[str, int, tf.TensorShape, tf.DType]], servers: int
) -> str:
    """Returns a table of variables by server, with a line of totals for each server.

    Args:
        placed: Name, server, shape and dtype of each variable.
        servers: Number of servers.
    """
    table = rich.table.Table(box=rich.box.SIMPLE)
    for column in ("server", "variable", "shape", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for server in range(servers):
        sizes = []
        for name, where, shape, dtype in placed:
            if where == server:
                sizes.append(shape.num_elements() * dtype.size)
                table.add_row(f"ps {server}", name, str(tuple(shape)), f"{sizes[-1]:,}")
        table.add_row(f"ps {server}", f"{len(sizes)} variables", "", f"{sum(sizes):,}")
    console = rich.console.Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
