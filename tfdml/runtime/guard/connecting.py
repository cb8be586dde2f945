"""Connects every rank to rank 0, over channels apart from those that carry tensors."""

import json
import secrets
import socket
import time

import psutil
import tensorflow as tf

from tfdml import topology
from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import machine
from tfdml.runtime.guard import channel

_CONNECT_SECONDS = 30.0
_PAYLOAD_BYTES = 4096


def connect_ranks(
    collective: Collective, identity: dict
) -> tuple[dict[int, channel.Channel], list[dict]]:
    """Connects every process to rank 0; all processes call this.

    Args:
        collective: Collective that broadcasts rank 0's address and secret.
        identity: This process's `rank`, `host` and `pid`.

    Returns:
        This process's channels by rank: all others on rank 0, that to rank 0 on the others. Then
        the identities of the processes at their ends, and its own.

    Raises:
        RuntimeError: If a rank cannot reach rank 0.
    """
    machines = collective.all_gather(tf.constant([machine()], tf.int64), "guard/machine")
    alone = len(set(machines.numpy().tolist())) == 1
    payload = bytes(_PAYLOAD_BYTES)
    listener = None
    if collective.rank == 0:
        listener = channel.listen("127.0.0.1" if alone else "")
        contact = {
            "hosts": ["127.0.0.1"] if alone else _addresses(),
            "port": listener.getsockname()[1],
            "secret": secrets.token_hex(32),
            "who": identity,
        }
        payload = json.dumps(contact).encode().ljust(_PAYLOAD_BYTES)
    words = tf.constant(list(payload), tf.uint8)
    contact = json.loads(bytes(collective.broadcast(words, "guard/contact").numpy().tolist()))
    if listener is None:
        found = _connect(contact, identity)
        return {0: found}, [identity, contact["who"]]
    with listener:
        return _accept_all(listener, bytes.fromhex(contact["secret"]), identity, collective.size)


def _connect(contact: dict, identity: dict) -> channel.Channel:
    """Connects this process to rank 0."""
    secret = bytes.fromhex(contact["secret"])
    for host in contact["hosts"]:
        connected = channel.connect(host, contact["port"], secret, _CONNECT_SECONDS / 6)
        if connected is not None:
            connected.send({"kind": "hello", **identity})
            return connected
    raise RuntimeError(
        f"Rank 0 must be reachable from every rank. Received on rank {identity['rank']}: no answer "
        f"at {', '.join(contact['hosts'])}, port {contact['port']}. Check firewalls, and run "
        f"`tfdml doctor` on both machines."
    )


def _accept_all(
    listener: socket.socket, secret: bytes, identity: dict, size: int
) -> tuple[dict[int, channel.Channel], list[dict]]:
    """Accepts the connections of all other ranks, on rank 0."""
    channels: dict[int, channel.Channel] = {}
    identities = {identity["rank"]: identity}
    deadline = time.monotonic() + _CONNECT_SECONDS
    while len(channels) < size - 1:
        connected = channel.accept(listener, secret, max(0.1, deadline - time.monotonic()))
        hello = connected.receive(_CONNECT_SECONDS / 6) if connected is not None else None
        if hello is not None and hello.get("kind") == "hello":
            identities[hello["rank"]] = hello
            channels[hello["rank"]] = connected
        elif time.monotonic() > deadline:
            missing = sorted(set(range(size)) - identities.keys())
            raise RuntimeError(
                f"Every rank must reach rank 0. Received: no connection from ranks {missing} "
                f"at {', '.join(_addresses())} in {_CONNECT_SECONDS:.0f} s. Check firewalls, "
                f"and run `tfdml doctor` on both machines."
            )
    return channels, list(identities.values())


def _addresses() -> list[str]:
    """Returns this machine's name in the job, then its IPv4 addresses, loopback last.

    The name comes first: it leads through the network chosen for the job, for example a tunnel.
    """
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    found.sort(key=lambda address: address.startswith("127."))
    name = topology.own_host()
    return found if name is None else list(dict.fromkeys([name, *found]))
