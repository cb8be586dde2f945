"""Hosts of a job: which machines run how many ranks, whether they answer, and how to reach them."""

import dataclasses
import ipaddress
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdml.runtime.launch.rank_process import quiet_variables
from tfdml.runtime.launch.supervisor import free_ports

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine and the number of ranks on it.

    Attributes:
        name: Host name or address; "localhost" for this machine, without ssh.
        ranks: Number of ranks on it.
    """

    name: str
    ranks: int

    @property
    def is_local(self) -> bool:
        """True if the ranks are started on this machine, without ssh."""
        return self.name in ("localhost", "127.0.0.1")

    @property
    def is_public(self) -> bool:
        """True if the name resolves to a globally routable address."""
        try:
            found = socket.getaddrinfo(self.name, None)
        except OSError:
            return False
        return any(ipaddress.ip_address(entry[4][0].split("%")[0]).is_global for entry in found)


def parse_hosts(text: str) -> list[Host]:
    """Parses a list such as `node1:4,node2:4`; a host without a number runs one rank.

    Raises:
        ValueError: If a part is neither a name nor a name with a positive number.
    """
    hosts = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if not name or (count and not count.isdecimal()) or count == "0":
            raise ValueError(
                f"`hosts` must be names with numbers of ranks, such as node1:4,node2:4. "
                f"Received: {part!r} in {text!r}."
            )
        hosts.append(Host(name, int(count or 1)))
    return hosts


def parse_spares(text: str, hosts: Sequence[Host]) -> list[str]:
    """Parses the names of spare hosts, such as `node3,node4`.

    Args:
        text: The names; "" for none.
        hosts: Hosts of the job.

    Raises:
        ValueError: If a name is empty, has a number of processes, or is given twice.
    """
    names = [name.strip() for name in text.split(",")] if text else []
    all_names = [*names, *(host.name for host in hosts)]
    if any(not name or ":" in name or all_names.count(name) > 1 for name in names):
        raise ValueError(
            f"`--spares` must be names of other machines than those of `--hosts`, each once and "
            f"without a number: a spare runs the processes of the machine that it replaces. "
            f"Received: {text!r}."
        )
    return names


def hosts_of_job(hosts: str, workers: int | None, default: int) -> list[Host]:
    """Returns where a job's ranks run, from the options `--hosts` and `--workers`.

    Args:
        hosts: List of hosts; "" for this machine.
        workers: Number of ranks; None if it was not given.
        default: Number of ranks on this machine if neither was given.

    Raises:
        ValueError: If `hosts` is not a list of hosts, or `workers` another number of ranks.
    """
    if not hosts:
        return [Host("localhost", workers or default)]
    parsed = parse_hosts(hosts)
    ranks = sum(host.ranks for host in parsed)
    if workers not in (None, ranks):
        raise ValueError(
            f"`--workers` must be left out with `--hosts`, or be its number of processes, {ranks}. "
            f"Received: --workers {workers}, --hosts {hosts}. Say in `--hosts` how many each "
            f"machine runs, as in --hosts {parsed[0].name}:{workers}."
        )
    return parsed


def answers(name: str) -> bool:
    """Returns whether a host can be reached by ssh; this machine always can.

    Args:
        name: Host name or address.
    """
    if Host(name, 1).is_local:
        return True
    try:
        return not subprocess.run(
            [*_SSH, name, "true"], capture_output=True, stdin=subprocess.DEVNULL, timeout=20
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def free_ports_of(host: Host, python: str) -> list[int]:
    """Returns ports of a host that are free, one for each of its ranks.

    Args:
        host: The host.
        python: Path of the interpreter, the same on all hosts.

    Raises:
        ConnectionError: If the host cannot be asked.
    """
    if host.is_local:
        return free_ports(host.ranks)
    ask = [python, "-m", "tfdml.runtime.launch.supervisor", "--free-ports", str(host.ranks)]
    answer = subprocess.run(
        remote_command(host, ask, quiet_variables()), capture_output=True, text=True, timeout=60
    )
    if answer.returncode:
        raise ConnectionError(
            f"`hosts` must be reachable by ssh without a password, with tfdml installed in the "
            f"same place. Received from {host.name}: {answer.stderr.strip()[-500:]}"
        )
    return [int(port) for port in answer.stdout.split()]


def remote_command(host: Host, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns the command that runs another one on a host by ssh, in the same directory.

    Args:
        host: The host.
        command: Command to run there.
        variables: Environment variables that it gets.
    """
    pairs = [f"{name}={value}" for name, value in variables.items()]
    directory = shlex.quote(str(Path.cwd()))
    return [*_SSH, host.name, f"cd {directory} && exec {shlex.join(['env', *pairs, *command])}"]
