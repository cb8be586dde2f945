"""Rendezvous of Horovod's ranks that `horovodrun` does not start.

Usage: `python -m tfdml.runtime.launch.horovod_rendezvous NAME:N,... COMMAND`, on the first of the
named hosts, each with its number of ranks. The command starts the ranks, and gives them their
numbers.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from tfdml.runtime.launch.job_hosts import parse_hosts
from tfdml.topology import child_environment


class HorovodRendezvous:
    """Server in this process at which Horovod's ranks meet over gloo, as under `horovodrun`.

    The ranks choose the network's interface themselves, unless `HOROVOD_GLOO_IFACE` names it.

    Args:
        hosts: Hosts, each with its number of ranks, in rank order.
        address: Address or name of this machine at which the ranks reach it.

    Attributes:
        job_variables: Environment variables that are the same for all ranks.

    Raises:
        ImportError: If Horovod is not installed.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], address: str):
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer()
        self.job_variables = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.start()),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        size = sum(count for _, count in hosts)
        self._slots: list[Any] = get_host_assignments([HostInfo(*host) for host in hosts], size)
        self._server.init(self._slots)

    def variables(self) -> list[dict[str, str]]:
        """Returns the environment variables of each rank, in rank order."""
        from horovod.runner.gloo_run import create_slot_env_vars

        slots = [create_slot_env_vars(slot) for slot in self._slots]
        return [
            {**self.job_variables, **{name: str(value) for name, value in slot.items()}}
            for slot in slots
        ]

    def stop(self) -> None:
        """Stops the server."""
        self._server.stop()


def interface_of(address: str) -> str:
    """Returns the name of this machine's network interface that has an address.

    Raises:
        ValueError: If none has it.
    """
    interfaces = psutil.net_if_addrs()
    for name, own in interfaces.items():
        if any(each.address == address for each in own):
            return name
    raise ValueError(
        f"`address` must be one of this machine. Received: {address!r}, where the interfaces are "
        f"{sorted(interfaces)}."
    )


def main(hosts: str, *command: str) -> int:
    """Runs this module's command line, and returns the command's exit code.

    Args:
        hosts: Hosts and their numbers of ranks; a comma at the end counts for nothing.
        *command: Command that starts the ranks.
    """
    ranks = [(host.name, host.ranks) for host in parse_hosts(hosts.rstrip(","))]
    rendezvous = HorovodRendezvous(ranks, ranks[0][0])
    try:
        environment = child_environment(**rendezvous.job_variables)
        return subprocess.run(command, env=environment).returncode
    finally:
        rendezvous.stop()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
