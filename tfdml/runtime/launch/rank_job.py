"""Job of ranks, on this machine or by ssh, which is restarted on the hosts that answer."""

import sys
from collections.abc import Sequence

from tfdml import topology
from tfdml.runtime.launch.host_pool import HostPool
from tfdml.runtime.launch.job_hosts import Host
from tfdml.runtime.launch.launcher import run, start_horovod, start_workers
from tfdml.runtime.launch.restarts import Failed, run_with_restarts


def run_rank_job(
    hosts: Sequence[Host],
    spares: Sequence[str],
    program: Sequence[str],
    horovod: bool,
    max_restarts: int,
    min_workers: int,
    job_directory: str = "",
) -> int:
    """Runs a job, restarts it after failures, and returns the exit code.

    Args:
        hosts: Hosts and their numbers of ranks.
        spares: Names of hosts that take the place of failed ones at a restart.
        program: Script and its arguments.
        horovod: Whether `horovodrun` starts the ranks.
        max_restarts: Maximum number of restarts after a failure.
        min_workers: Minimum number of ranks to restart with.
        job_directory: Absolute path of the directory for reports; "" if the ranks choose one.
    """
    for host in [*hosts, *(Host(name, 1) for name in spares)]:
        if host.is_public:
            print(
                f"tfdml launch: {host.name} has a public address, and TensorFlow's "
                f"servers and Horovod's rendezvous are not authenticated: anyone who reaches their "
                f"ports can run code there. Use a private network.",
                file=sys.stderr,
                flush=True,
            )
    start = start_horovod if horovod else start_workers
    pool = HostPool(hosts, spares)
    there = list(hosts)

    def attempt() -> Failed:
        return run(start(there, program, sys.executable, topology.job_variables(job_directory)))

    def prepare() -> str:
        there[:] = pool.wait(min_workers)
        return ", on " + ", ".join(f"{host.name}:{host.ranks}" for host in there)

    return run_with_restarts(attempt, max_restarts, lambda failed: failed[0].code, prepare)
