"""`tfdml timeline`: merges the ranks' files of a `Timeline`, and shows what they tell."""

from pathlib import Path
from typing import Annotated

import typer


def timeline(
    directory: Annotated[
        Path, typer.Argument(help="The directory of `tfdml.callbacks.Timeline`.", metavar="DIR")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the merged trace to this file.",
            metavar="FILE",
            show_default="DIR/trace.json",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw a typical step into this PNG, SVG or PDF file.", metavar="FILE"),
    ] = None,
    longest: Annotated[
        int, typer.Option(help="Show so many of the longest waits and gaps.", min=1)
    ] = 5,
) -> None:
    """Show where the steps' time went: overlap, waits for ranks, and gaps on the wire.

    For example:

    `tfdml timeline run1/timeline`

    `tfdml timeline run1/timeline --output trace.json --picture step.png`

    A training writes the files with `callbacks=[tfdml.callbacks.Timeline("run1/timeline")]`, one
    for each rank. They are put on rank 0's clock and merged into a trace, which
    https://ui.perfetto.dev and chrome://tracing open: a process for each rank, and arrows between
    the ranks' parts of an exchange.

    *Overlap* is the part of the exchange that was done while gradients were still computed. A rank
    *waits* in an exchange until the last rank takes part. A *gap* is a time between a step's
    exchanges at which none was on the wire.
    """
    from tfdml.cli import timeline_report

    try:
        if not directory.is_dir():
            raise ValueError(f"DIR must be a directory. Received: {directory}.")
        for option, file in (("--output", output), ("--picture", picture)):
            if file is not None and not file.parent.is_dir():
                raise ValueError(
                    f"`{option}` must be in a directory that exists. Received: {file}."
                )
        timeline_report.show(directory, output or directory / "trace.json", picture, longest)
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"tfdml timeline: {error}", err=True)
        raise typer.Exit(1) from error
