"""`tfdml bench`: measures the network between machines and predicts the gain of compression."""

import sys
from typing import Annotated

import typer


def bench(
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=2,
            help="Number of processes on this machine.",
            show_default="2",
        ),
    ] = None,
    hosts: Annotated[
        str,
        typer.Option(
            help="Machines to measure between by ssh, each with its number of processes.",
            metavar="NAME:N,...",
        ),
    ] = "",
    horovod: Annotated[
        bool, typer.Option("--horovod", help="Measure Horovod's exchanges instead of TensorFlow's.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Predict for this saved model, at the same path on all hosts.",
            metavar="FILE.keras",
        ),
    ] = "",
) -> None:
    """Measure latency, bandwidth and codecs, and predict a step's exchange for each compressor.

    For example:

    `tfdml bench --workers 2`

    `tfdml bench --hosts node1:1,node2:1 --horovod --model model.keras`

    These are the measurements that `compression="auto"` makes at its start, for all compressors.
    Without a model the table is for six layers of 2,048 x 2,048 numbers. Takes half a minute.
    """
    from tfdml.runtime.launch import job_hosts, launcher, rank_process

    program = ["-m", "tfdml.cli.bench_rank"]
    program += ["--horovod"] if horovod else []
    program += ["--model", model] if model else []
    try:
        parsed_hosts = job_hosts.hosts_of_job(hosts, workers, default=2)
        if sum(host.ranks for host in parsed_hosts) < 2:
            raise ValueError(
                f"`hosts` must have at least two ranks, to measure the connection between them. "
                f"Received: hosts={hosts!r}."
            )
        start = launcher.start_horovod if horovod else launcher.start_workers
        failed = launcher.run(start(parsed_hosts, program, sys.executable))
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml bench: {error}", err=True)
        raise typer.Exit(2) from error
    if failed:
        typer.echo(rank_process.explain(failed), err=True)
        raise typer.Exit(failed[0].code)
