"""Runs a command beside a server at which Horovod's ranks meet, without `horovodrun`.

Usage: `python -m tfdml.runtime.launch.rendezvous NAME:N,... COMMAND`, on the first of the named
hosts, each with its number of ranks. The command starts the ranks, and tells them their numbers.
"""

import subprocess
import sys

from tfdml.runtime.launch.job_hosts import parse_hosts
from tfdml.topology import child_environment


def main(hosts: str, *command: str) -> int:
    """Runs this module's command line, and returns the command's exit code.

    Args:
        hosts: Hosts and their numbers of ranks; a comma at the end counts for nothing.
        *command: Command that starts the ranks.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    infos = [HostInfo(host.name, host.ranks) for host in parse_hosts(hosts.rstrip(","))]
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(infos, sum(info.slots for info in infos)))
    environment = child_environment(
        HOROVOD_GLOO_RENDEZVOUS_ADDR=infos[0].hostname,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    try:
        return subprocess.run(command, env=environment).returncode
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
