"""`tfdml hang-report`: asks a running job which rank keeps the others waiting."""

from pathlib import Path
from typing import Annotated

import typer


def hang_report(
    pid: Annotated[
        int | None, typer.Option(min=1, help="Id of one of the job's processes on this machine.")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="The directory that `tfdml launch --job-dir` has given the job."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the ranks.")] = 60.0,
) -> None:
    """Show which rank keeps a job waiting: its last exchanges, and where its threads are.

    For example:

    `tfdml hang-report --pid 12474`

    `tfdml hang-report --job run1/job`

    The job must use `HorovodStrategy` or `MultiWorkerMirroredStrategy`, and goes on. All ranks
    write the stacks of their threads and their last 200 exchanges, and rank 0 a summary, which is
    printed. A rank whose process is stopped, or whose interpreter is locked, is looked at by
    another one on its machine. The exit code is 1 if no rank answers.
    """
    from tfdml.runtime.hang_report import asking

    if (pid is None) == (job is None):
        typer.echo("tfdml hang-report: one of `--pid` and `--job` must be given.", err=True)
        raise typer.Exit(2)
    try:
        processes = asking.find_processes(pid, job)
    except ValueError as error:
        typer.echo(f"tfdml hang-report: {error}", err=True)
        raise typer.Exit(2) from error
    answer = asking.ask_in_turn(processes, timeout)
    typer.echo(answer.text, nl=False)
    if not answer.is_complete:
        raise typer.Exit(1)
