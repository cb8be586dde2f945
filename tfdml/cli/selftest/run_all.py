"""Runs of all jobs of `tfdml test`, each compared to the reference."""

from tfdml.cli.selftest import jobs, report
from tfdml.cli.selftest.comparison import Outcome, RunResult, judge
from tfdml.runtime.launch.job_hosts import Host


def run_all(
    wanted: list[jobs.StrategyJob],
    commands: dict[str, list[str]],
    workers: int,
    hosts: str,
    parsed_hosts: list[Host],
    shown: report.RunDisplay,
) -> None:
    """Runs the jobs one after the other, and shows each run's result.

    Args:
        wanted: Jobs to run, the reference first.
        commands: Command of each job, by the name of its first run.
        workers: Number of processes on this machine.
        hosts: Value of `--hosts`.
        parsed_hosts: Parsed value of `--hosts`.
        shown: Display of the runs, which gets the results.
    """
    reference = None
    for job in wanted:
        if not jobs.is_installed(job) or (job is not jobs.REFERENCE and reference is None):
            status = Outcome.NOT_RUN if jobs.is_installed(job) else Outcome.NOT_INSTALLED
            for run in job.runs:
                shown.end(RunResult(run, status))
            continue
        far = bool(hosts) and job.on_hosts
        where = f"on {hosts}" if far else "on this machine"
        by_name = {run.name: run for run in job.runs}
        shown.begin(job.runs[0], where)
        ended = jobs.run(
            commands[job.runs[0].name],
            lambda event, runs=by_name, where=where: shown.begin(runs[event.run], where),
        )
        replicas = sum(host.ranks for host in parsed_hosts) if far else workers
        if job is jobs.REFERENCE:
            replicas = 1
        # A process with several devices reports once for all of them, and so does a chief.
        ranks = replicas if job.reports_by_rank else 1
        failed = False
        for run in job.runs:
            result = judge(run, ended, replicas, ranks, reference)
            # The processes of a failed job are gone, so its later runs cannot run.
            result = RunResult(run, Outcome.NOT_RUN) if failed else result
            shown.end(result)
            failed = failed or result.status is Outcome.FAILED
        if job is jobs.REFERENCE and not shown.results[0].is_bad:
            reference = next(event for event in ended.events if event.is_end)
