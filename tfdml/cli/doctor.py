"""`tfdml doctor`: checks this machine and suggests fixes."""

import concurrent.futures
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdml.cli.checks.finding import Finding, Status

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}
_WORST_FIRST = [Status.ERROR, Status.WARNING, Status.OK]
# Lines shown of a failed check's output; --verbose shows all.
_LINES_OF_OUTPUT = 3


def doctor(
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show all output of failed checks and known upstream problems."
        ),
    ] = False,
    data: Annotated[
        str,
        typer.Option(
            help="Measure instead how fast this TFRecord data set is read.",
            metavar="PATH",
            rich_help_panel="Reading data",
        ),
    ] = "",
    split: Annotated[
        str | None,
        typer.Option(
            help="Split of that data set to read.", metavar="NAME", rich_help_panel="Reading data"
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(min=1, help="Number of records in a batch.", rich_help_panel="Reading data"),
    ] = 256,
    image_size: Annotated[
        str | None,
        typer.Option(
            help="Size to which images are resized.",
            metavar="HEIGHTxWIDTH",
            show_default="that of their files; 224x224 if they differ",
            rich_help_panel="Reading data",
        ),
    ] = None,
) -> None:
    """Check this machine, and show a fix for each problem.

    For example:

    `tfdml doctor`

    `tfdml doctor --data data/photos --split train`

    Checks the versions, the settings of Keras, the devices, Horovod and the host name, and runs an
    all-reduce on two processes. Takes about 20 seconds. The exit code is 1 if training cannot work.

    With `--data`, times each stage of reading a data set that `tfdml records convert` has written,
    in one process on this machine, and shows the slowest stage and how to speed it up.
    """
    if data:
        return diagnose_data(data, split, batch_size, image_size)
    console = Console(highlight=False)
    with console.status("Looking…"):
        findings = examine()
    show(console, findings, verbose)
    if any(finding.status is Status.ERROR for finding in findings):
        raise typer.Exit(1)


def show(console: Console, findings: list[Finding], verbose: bool) -> None:
    """Prints the findings with their fixes, the worst first.

    Args:
        console: Console to print on.
        findings: Findings of all checks.
        verbose: Whether to print full outputs, and upstream problems that have a workaround.
    """
    from tfdml.cli.checks.versions import known_problems

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in sorted(findings, key=lambda f: _WORST_FIRST.index(f.status)):
        first, *others = finding.what.splitlines()
        # The last lines of a program's output say why it failed.
        what = [first, *(others if verbose else others[-_LINES_OF_OUTPUT:])]
        lines = [escape(line) for line in what]
        if finding.fix:
            lines.append(f"[bold]{escape(finding.fix)}[/]")
        status = f"[{_COLOURS[finding.status]}]{finding.status.value}[/]"
        table.add_row(status, finding.name, "\n".join(lines))
    console.print(table)
    problems = known_problems()
    console.print()
    if verbose and problems:
        console.print("Upstream problems of these versions, and what to use instead:")
        for what, thread, instead in problems:
            console.print(f"- {what} ({thread}): {instead}", markup=False, soft_wrap=True)
        console.print()
    number = {status: sum(f.status is status for f in findings) for status in Status}
    if number[Status.ERROR]:
        console.print(
            "Training does not work here yet: fix the errors above, beginning with the first."
        )
    elif number[Status.WARNING]:
        console.print("Training works here. The warnings above may matter to you.")
    else:
        console.print("Everything that training needs works.")
    own = [instead for *_, instead in problems if instead.startswith("tfdml.")]
    if own and not verbose and not number[Status.ERROR]:
        console.print(
            f"With Keras 3 use {', '.join(own)}: TensorFlow's and Horovod's own do not train."
        )
    if not verbose:
        console.print("More: tfdml doctor --verbose. To train on it: tfdml test.")


def diagnose_data(path: str, split: str | None, batch_size: int, size: str | None) -> None:
    """Prints the speed of each stage of reading a data set, and the slowest stage's fix."""
    import tensorflow as tf

    from tfdml.cli.sizes import image_size
    from tfdml.data.check.diagnosis import diagnose

    console = Console(highlight=False)
    try:
        with console.status("Reading…"):
            found = diagnose(path, split, batch_size, image_size(size, "image_size"))
    except tf.errors.InvalidArgumentError as error:
        if size is not None:
            raise
        # The images that were compared have one size, and others do not.
        typer.echo("tfdml doctor: Images differ in size. Give --image-size 224x224.", err=True)
        raise typer.Exit(1) from error
    except (ValueError, OSError) as reason:
        typer.echo(f"tfdml doctor: {reason}", err=True)
        raise typer.Exit(1) from reason
    table = Table(title=f"Reading {path}, batches of {batch_size}", title_justify="left")
    for heading in ("Stage, timed alone", "records/s", ""):
        table.add_column(heading, justify="right" if heading == "records/s" else "left")
    for stage in found.stages:
        table.add_row(stage.name, f"{stage.rate:,.0f}", escape(stage.detail))
    table.add_section()
    table.add_row("the whole pipeline", f"{found.pipeline:,.0f}", "all stages at once")
    console.print(table)
    slowest = found.slowest
    console.print(f"\nThe slowest stage: {slowest.name}.\n- {slowest.fix}", markup=False)
    for line in found.advice:
        console.print(f"- {line}", markup=False, soft_wrap=True)


def examine() -> list[Finding]:
    """Runs all checks.

    Returns:
        Findings, in the order in which they should be fixed.
    """
    from tfdml.cli.checks import codecs, devices, horovod, job, network, settings, versions
    from tfdml.cli.checks.all_reduce import check_all_reduce

    findings = [
        versions.check_tfdml(),
        versions.check_python(),
        versions.check_tensorflow(),
        versions.check_keras(),
        settings.check_legacy_keras(),
        settings.check_backend(),
    ]
    # They only wait for child processes that import TensorFlow.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        looking = pool.submit(devices.check_devices)
        loading = pool.submit(horovod.check_horovod)
        compiled = pool.submit(codecs.check_codecs)
        found, loaded = loading.result()
        findings += [found, compiled.result(), devices.check_host(), looking.result()]
    findings.append(network.check_host_name())
    if (started := job.check_job()) is not None:
        findings.append(started)
    if loaded is not None:
        findings.append(check_all_reduce(loaded.transports))
    return findings
