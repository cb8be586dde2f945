"""Rendezvous of Horovod's ranks that `horovodrun` does not start."""

from collections.abc import Sequence
from typing import Any

import psutil


class HorovodRendezvous:
    """Server in this process at which Horovod's ranks meet over gloo, as under `horovodrun`.

    Args:
        hosts: Hosts, each with its number of ranks, in rank order.
        address: Address of this machine at which the ranks reach it.

    Raises:
        ImportError: If Horovod is not installed.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], address: str):
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousServer

        self._address = address
        self._server = RendezvousServer()
        self._port = self._server.start()
        size = sum(count for _, count in hosts)
        self._slots: list[Any] = get_host_assignments([HostInfo(*host) for host in hosts], size)
        self._server.init(self._slots)

    def variables(self) -> list[dict[str, str]]:
        """Returns the environment variables of each rank, in rank order.

        Those for the network say "lo"; a rank that others reach from their hosts sets
        `HOROVOD_GLOO_IFACE` to its own `interface_of(address)`.
        """
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

        job = create_run_env_vars(self._address, ["lo"], self._port)
        ranks = [{**job, **create_slot_env_vars(slot)} for slot in self._slots]
        return [{name: str(value) for name, value in rank.items()} for rank in ranks]

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
