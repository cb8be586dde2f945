"""`tfdml test`: trains under every installed strategy, locally or by ssh."""

import enum
from pathlib import Path
from typing import Annotated

import typer


class StrategyName(str, enum.Enum):
    """Names accepted by `--only`."""

    MIRRORED = "mirrored"
    MULTI_WORKER_MIRRORED = "multi_worker_mirrored"
    HOROVOD = "horovod"
    PARAMETER_SERVER = "parameter_server"


def self_test(
    workers: Annotated[
        int, typer.Option("--workers", "-n", min=1, help="Number of processes on this machine.")
    ] = 2,
    hosts: Annotated[
        str,
        typer.Option(
            help="Machines to train on by ssh, each with its number of processes.",
            metavar="NAME:N,...",
        ),
    ] = "",
    only: Annotated[
        list[StrategyName] | None,
        typer.Option(help="Test only this strategy; may be given several times."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Train a small model under each installed strategy; show which are right, and their speed.

    For example:

    `tfdml test`

    `tfdml test --hosts node1:2,node2:2`

    `tfdml test --only multi_worker_mirrored --json results.json`

    One process of plain Keras is the reference: losses and weights of the others must agree with
    it, and weights must be bit-identical on all ranks. One run is compressed. Takes a minute or
    two. The exit code is 1 if a strategy failed or is wrong.
    """
    from rich.console import Console

    from tfdml.cli.selftest import jobs, report
    from tfdml.cli.selftest.run_all import run_all
    from tfdml.runtime.launch.job_hosts import parse_hosts

    try:
        parsed_hosts = parse_hosts(hosts) if hosts else []
        if json is not None and not json.parent.is_dir():
            raise ValueError(f"`json` must be in a directory that exists. Received: {json}.")
    except ValueError as error:
        typer.echo(f"tfdml test: {error}", err=True)
        raise typer.Exit(2) from error
    wanted = [jobs.REFERENCE] + [
        job for job in jobs.JOBS if not only or job.strategy in {name.value for name in only}
    ]
    commands = {
        run.name: jobs.command(job, workers, hosts, parsed_hosts)
        for job in wanted
        for run in job.runs
    }
    console = Console(highlight=False)
    try:
        with report.RunDisplay(console) as shown:
            run_all(wanted, commands, workers, hosts, parsed_hosts, shown)
    except KeyboardInterrupt:
        typer.echo("tfdml test: interrupted; its processes have been ended.", err=True)
        raise typer.Exit(130) from None
    report.explain(console, shown.results, commands, hosts)
    if json is not None:
        report.write_json(json, shown.results, hosts)
    if any(result.is_bad for result in shown.results):
        raise typer.Exit(1)
