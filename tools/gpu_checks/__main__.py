"""Command line of `tools/gpu_report`."""

import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tools.gpu_checks.checks import CHECKS, rows_of
from tools.gpu_checks.machine import look
from tools.gpu_checks.page import in_words, page

NAMES = {check.name: check for check in CHECKS}
HELP = "\n\n".join(
    [
        "Check tfdml on this machine's GPUs, and write one page of what holds and how fast it is.",
        "Each line of the page is a check that can fail: numbers are compared with those of one "
        "device, of a processor or of the stock strategies. Figures of speed are shown, and "
        "decide nothing. Each job is a process of its own with a time limit: one that crashes or "
        "hangs fails its line alone. What cannot be checked here says what it needs.",
        "Without a GPU it runs on processors, whose logical CPUs play the devices, and the page "
        "is headed so: about four minutes on two cores. Exits with 1 if a check fails.",
        "`tools/gpu_report --output gpu_report.md`",
        "`tools/gpu_report --devices cpu --only mirrored --only prefetch`",
        "The checks:",
        *(f"- `{check.name}`: {check.about}" for check in CHECKS),
    ]
)


class Devices(str, Enum):
    """Kinds of devices that a report covers."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


def main(
    output: Annotated[
        Path | None,
        typer.Option(help="Write the page to this file.", show_default="standard output"),
    ] = None,
    devices: Annotated[
        Devices, typer.Option(help="What to run on; auto is GPUs where TensorFlow sees any.")
    ] = Devices.auto,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Make this check only; may be given again.", metavar="CHECK"),
    ] = None,
) -> None:
    """Runs the checks and writes the page."""
    unknown = sorted(set(only or ()) - set(NAMES))
    if unknown:
        raise typer.BadParameter(
            f"`--only` must be one of {', '.join(NAMES)}. Received: {', '.join(unknown)}."
        )
    machine = look(devices.value)
    rows = []
    for check in CHECKS:
        if only and check.name not in only:
            continue
        began = time.monotonic()
        found = rows_of(check, machine)
        rows += found
        line = f"{check.name}: {in_words(found)}, {time.monotonic() - began:.0f} s"
        typer.echo(line, err=True)
    text = page(rows, machine, ["tools/gpu_report", *sys.argv[1:]])
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text, encoding="utf-8")
    raise typer.Exit(1 if any(row.result == "FAIL" for row in rows) else 0)


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    app.command(help=HELP)(main)
    app(prog_name="tools/gpu_report")
