"""`tfdml launch`: starts a training script on several processes, locally or by ssh.

Options of the command; `runtime/launch` does the work.
"""

from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def launch(
    program: Annotated[
        list[str],
        typer.Argument(help="The training script and its arguments.", metavar="SCRIPT [ARGS]..."),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=1,
            help="Number of processes on this machine.",
            show_default="1",
        ),
    ] = None,
    hosts: Annotated[
        str,
        typer.Option(
            help="Machines to start the job on by ssh, each with its number of processes.",
            metavar="NAME:N,...",
        ),
    ] = "",
    spares: Annotated[
        str,
        typer.Option(
            help="Standby machines, each used at a restart in place of one that does not answer.",
            metavar="NAME,...",
        ),
    ] = "",
    horovod: Annotated[
        bool, typer.Option("--horovod", help="Start the job with horovodrun, for HorovodStrategy.")
    ] = False,
    ps: Annotated[
        int,
        typer.Option(
            "--ps", min=0, help="Number of parameter servers, for ParameterServerStrategy."
        ),
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restart a failed job, at most this many times.")
    ] = 0,
    min_workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Restart on the remaining hosts if they have this many processes; 0 for all.",
        ),
    ] = 0,
    job_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory on each machine for reports on the job.",
            show_default="a temporary one",
        ),
    ] = None,
    print_slurm: Annotated[
        bool,
        typer.Option(
            "--print-slurm", help="Print a script for sbatch instead of starting the job."
        ),
    ] = False,
    print_kubernetes: Annotated[
        bool,
        typer.Option(
            "--print-kubernetes", help="Print a TrainJob or MPIJob instead of starting the job."
        ),
    ] = False,
) -> None:
    """Start a training script on several processes, and stop them all when one fails.

    For example:

    `tfdml launch --workers 2 train.py`

    `tfdml launch --hosts node1:4,node2:4 train.py --epochs 10`

    `tfdml launch --workers 2 --ps 1 train.py`

    `tfdml launch --horovod --workers 2 train.py`

    Each process is a worker of `MultiWorkerMirroredStrategy`, with its own `TF_CONFIG`; with
    `--horovod` a rank of `HorovodStrategy`. With `--ps` the script runs on one more process, the
    chief of a `ParameterServerStrategy`, and workers and servers run `tfdml serve`; a worker that
    dies is started again.

    With `--max-restarts 3` a job that fails, or is asked to end, is restarted up to three times;
    with `FaultTolerantCheckpoint` it resumes where it was. A host that does not answer then is
    replaced by a spare: `--hosts node1:4,node2:4 --spares node3` runs four ranks on `node3`. When
    no spare is left, `--min-workers 2` restarts the job on the hosts that still answer, if they
    have at least two ranks. A script that fails in the same way twice at its start is not
    restarted again.

    Each line of output begins with its rank. When a rank fails, its last lines are printed, and
    its exit code becomes this command's. No process is left running, however this command ends.

    TensorFlow's servers and Horovod's rendezvous are **not authenticated**: anyone who reaches
    their ports can run code. On one machine the ranks communicate over the loopback address;
    across machines use a private network.
    """
    from tfdml.runtime.launch import (
        job_hosts,
        kubernetes_manifests,
        rank_job,
        server_job,
        slurm_scripts,
        train_jobs,
    )

    try:
        if ps:
            if hosts or spares or horovod or job_dir:
                raise ValueError(
                    "`--ps` must be used without `--hosts`, `--spares`, `--horovod` and "
                    "`--job-dir`: it starts the job on this machine only, and its processes make "
                    "no reports. Received: one of them. For several machines see `--print-slurm` "
                    "and `--print-kubernetes`, or run `tfdml serve` with a TF_CONFIG on each."
                )
            if print_slurm or print_kubernetes:
                make = train_jobs.parameter_servers
                if print_slurm:
                    make = slurm_scripts.parameter_servers
                typer.echo(make(workers or 1, ps, program), nl=False)
                return
            raise typer.Exit(server_job.run_server_job(workers or 1, ps, program, max_restarts))
        parsed_hosts = job_hosts.hosts_of_job(hosts, workers, default=1)
        ranks = sum(host.ranks for host in parsed_hosts)
        if min_workers > ranks or (min_workers and not max_restarts):
            raise ValueError(
                f"`--min-workers` must be at most the number of ranks, {ranks}, and needs "
                f"`--max-restarts`. Received: --min-workers {min_workers}, --max-restarts "
                f"{max_restarts}."
            )
        standby = job_hosts.parse_spares(spares, parsed_hosts)
        if standby and not (hosts and max_restarts):
            raise ValueError(
                f"`--spares` needs `--hosts` and `--max-restarts`: spares are used at restarts. "
                f"Received: --spares {spares}, --hosts {hosts or 'none'}, --max-restarts "
                f"{max_restarts}."
            )
        if job_dir and (print_slurm or print_kubernetes):
            raise ValueError(
                "`--job-dir` must be used without `--print-slurm` and `--print-kubernetes`. "
                f"Received: --job-dir {job_dir}. Set TFDML_JOB_DIRECTORY for all ranks in what "
                "they print."
            )
        if print_slurm or print_kubernetes:
            make = slurm_scripts.ranks if print_slurm else kubernetes_manifests.ranks
            nodes, each = slurm_scripts.layout(parsed_hosts, print_slurm or horovod)
            typer.echo(make(nodes, each, program, horovod), nl=False)
            return
        raise typer.Exit(
            rank_job.run_rank_job(
                parsed_hosts,
                standby,
                program,
                horovod,
                max_restarts,
                min_workers or ranks,
                str(job_dir.resolve()) if job_dir else "",
            )
        )
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml launch: {error}", err=True)
        raise typer.Exit(2) from error
