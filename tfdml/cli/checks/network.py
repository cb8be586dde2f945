"""Check that other hosts can reach the address that this host's name resolves to.

Horovod's gloo contexts bind to the address of the host name, whatever network interface was
requested. If that is a loopback address (the default of many distributions), jobs work on one
machine but fail on several with "connection refused" (pytorch/gloo#223).
"""

import ipaddress
import socket

import psutil

from tfdml.cli.checks.finding import Finding, error, ok, warning

_NAME = "Host name"


def check_host_name(name: str | None = None) -> Finding:
    """Checks that a host name resolves to an address of this host that others can reach.

    Args:
        name: Host name; this machine's by default.
    """
    name = socket.gethostname() if name is None else name
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as failure:
        return error(
            _NAME,
            f"{name} does not resolve ({failure})",
            f"Name it in /etc/hosts: {_suggestion(name)}",
        )
    address = answers[0][4][0]
    if ipaddress.ip_address(address).is_loopback:
        return warning(
            _NAME,
            f"{name} resolves to {address}, which only this machine can reach",
            "On a single machine nothing needs to be done. On several, make the name resolve to an "
            f"address that the others can reach, in /etc/hosts: {_suggestion(name)}",
        )
    if failure := _cannot_listen(answers[0]):
        return error(
            _NAME,
            f"{name} resolves to {address}, on which this machine cannot listen ({failure})",
            "Make the name resolve to an address of this machine, in /etc/hosts: "
            f"{_suggestion(name)}",
        )
    return ok(_NAME, f"{name} resolves to {address}")


def reachable_addresses() -> list[str]:
    """Returns this machine's IPv4 addresses except loopback."""
    return [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    ]


def _cannot_listen(answer: tuple) -> str:
    family, kind, protocol, _, address = answer
    try:
        with socket.socket(family, kind, protocol) as listener:
            listener.bind((address[0], 0, *address[2:]))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2], timeout=5):
                return ""
    except OSError as failure:
        return str(failure)


def _suggestion(name: str) -> str:
    addresses = reachable_addresses() or ["ADDRESS"]
    return f"`{addresses[0]} {name}` (instead of any other line with {name})"
