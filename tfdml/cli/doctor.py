"""`tfdml doctor`: what works on this machine, and what to do where it does not."""

import concurrent.futures
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdml.cli.checks import codecs, devices, horovod, network, settings, versions
from tfdml.cli.checks.all_reduce import check_all_reduce
from tfdml.cli.checks.finding import Finding, Status

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}


def doctor(
    data: Annotated[
        str, typer.Option(help="Say what limits reading this TFRecord data set, instead.")
    ] = "",
    split: Annotated[str | None, typer.Option(help="Its split, where it has several.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Records of a batch, with --data.")] = 256,
) -> None:
    """Check this machine and say what to do for each thing that is wrong.

    Looks at the versions of Python, TensorFlow, Keras and Horovod and at upstream problems of
    their combination, at settings that turn Keras 3 off, at what Horovod was built with, at the
    devices, and at whether other hosts can reach what this host's name resolves to. Then it runs
    a real all-reduce on two processes of this machine. Takes about 20 seconds.

    The exit code is 0 when everything that training needs works, and 1 otherwise. A warning is
    something that may matter, such as a host name that only this machine can resolve.

    With `--data DIRECTORY` it times each stage of reading a data set that `tfdml records convert`
    has written, for one process on this machine, and says which one limits it and what helps.
    """
    if data:
        return diagnose_data(data, split, batch_size)
    console = Console(highlight=False)
    with console.status("Looking…"):
        findings = examine()
    console.print(_table(findings))
    _print_known_problems(console)
    todo = [finding for finding in findings if finding.fix]
    if todo:
        console.print("\nWhat to do:")
    for finding in todo:
        console.print(f"- {finding.name}: {finding.fix}", markup=False, soft_wrap=True)
    if any(finding.status is Status.ERROR for finding in findings):
        raise typer.Exit(1)
    console.print("\nEverything that training needs works.")


def diagnose_data(path: str, split: str | None, batch_size: int) -> None:
    """Prints how fast each stage of reading a data set is."""
    from tfdml.data.diagnosis import diagnose

    console = Console(highlight=False)
    try:
        with console.status("Reading…"):
            found = diagnose(path, split, batch_size)
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
        The findings, in the order in which they should be read and mended.
    """
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
    if loaded is not None:
        findings.append(check_all_reduce(loaded.transports))
    return findings


def _table(findings: list[Finding]) -> Table:
    table = Table(title="tfdml doctor", title_justify="left")
    for heading in ("Check", "", "Found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.status]
        status = f"[{colour}]{finding.status.value}[/]"
        table.add_row(finding.name, status, escape(finding.what))
    return table


def _print_known_problems(console: Console) -> None:
    problems = versions.known_problems()
    if not problems:
        return
    table = Table()
    for heading in ("Upstream problem of these versions", "Thread", "Use instead"):
        table.add_column(heading, overflow="fold")
    for row in problems:
        table.add_row(*row)
    console.print(table)
