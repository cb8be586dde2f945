"""`tfdml estimate-memory`: what training a script's model takes on each rank."""

from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def estimate_memory(
    program: Annotated[
        list[str],
        typer.Argument(help="The training script and its arguments.", metavar="SCRIPT [ARGS]..."),
    ],
    ranks: Annotated[
        str,
        typer.Option(
            help="Numbers of ranks in the table.", metavar="N,...", show_default="1,2,4,8"
        ),
    ] = "",
    memory: Annotated[
        str,
        typer.Option(
            help="Name the first choice that fits into this memory of a rank.", metavar="SIZE"
        ),
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Write a bar plot to this file.", metavar="FILE")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the table to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Show the memory that each rank needs to train a script's model, without training it.

    For example:

    `tfdml estimate-memory train.py`

    `tfdml estimate-memory --memory 16GB --plot memory.png train.py --batch 512`

    The script runs until its first `fit`, which is not done; what it reads and writes before that,
    it does. The model, the batch and the strategy are those of that call. Each rank's weights,
    gradients, slots, activations, exchange buffers and residuals are shown for several numbers of
    ranks, with and without sharded slots, divided embedding tables and gradient checkpointing, and
    the peak of all together.

    The peak is what training takes above a process that has imported TensorFlow: leave about 0.8 GB
    for that on processors. `--memory 16GB` names the first choice that fits, and the exit code is 1
    if none does.
    """
    from tfdml.cli.sizes import byte_size, whole_numbers

    script, *arguments = program
    try:
        limit = byte_size(memory, "--memory") if memory else None
        numbers = whole_numbers(ranks, "--ranks") if ranks else None
        for option, file in (("--plot", plot), ("--json", json)):
            if file is not None and not file.parent.is_dir():
                raise ValueError(
                    f"`{option}` must be in a directory that exists. Received: {file}."
                )
        if not Path(script).is_file():
            raise ValueError(f"SCRIPT must be a file. Received: {script}, which does not exist.")
        from tfdml.memory import script_report

        report = script_report.report_of(script, arguments, numbers)
        if plot is not None:
            report.plot(plot)
    except (ValueError, ImportError) as error:
        typer.echo(f"tfdml estimate-memory: {error}", err=True)
        raise typer.Exit(2) from error
    if json is not None:
        script_report.write_json(report, json)
    typer.echo(str(report))
    if limit is None:
        return
    first = report.fits(limit)
    if first is None:
        typer.echo(f"\nNone of these fits into {memory}: use more ranks, or a smaller batch.")
        raise typer.Exit(1)
    typer.echo(f"\nThe first that fits into {memory}: {first.name}.")
