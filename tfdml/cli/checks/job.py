"""Check of the job that has started this process: its processes, and those of them on this host."""

from collections.abc import Mapping

from tfdml import topology
from tfdml.cli.checks.finding import Finding, ok


def check_job(environment: Mapping[str, str] | None = None) -> Finding | None:
    """Describes the job, as its launcher has set it; returns None if there is no job.

    Args:
        environment: The variables to read; those of this process by default.
    """
    job = topology.started_together(environment)
    if job.size == 1:
        return None
    local = topology.on_this_host(environment)
    here = local.size if local.launcher else job.local_size
    what = f"{job.size} processes, {here} of them on this host, started by {job.launcher}"
    if 1 < here < job.size:
        what += "\nCompressed gradients are summed on each host first where that is faster"
    return ok("Job", what)
