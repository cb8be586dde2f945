"""Starts a job's ranks, and ends all of them when one fails."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdml import topology
from tfdml.runtime.immediate_exit import EXIT_CODE
from tfdml.runtime.launch.job_hosts import Host, free_ports_of, remote_command
from tfdml.runtime.launch.rank_process import (
    HorovodRank,
    HorovodRun,
    RankProcess,
    is_script_error,
    quiet_variables,
)
from tfdml.runtime.launch.supervisor import TERM_SECONDS

# Seconds that the other ranks get to end by themselves after one has failed.
GRACE_SECONDS = 10.0
# Grace after an error of a rank's script, for which the guard ends the others before that rank.
_ERROR_GRACE_SECONDS = 1.2


def run(ranks: Sequence[RankProcess]) -> list[RankProcess | HorovodRank]:
    """Waits for all ranks. When one fails, ends the others after a time.

    Returns:
        The ranks that failed, the one to blame first.
    """
    failed_at, grace = None, GRACE_SECONDS
    try:
        while any(rank.code is None for rank in ranks):
            time.sleep(0.05)
            codes = [rank.code for rank in ranks if rank.code]
            if codes and failed_at is None:
                failed_at = time.monotonic()
            if any(map(is_script_error, codes)):
                grace = _ERROR_GRACE_SECONDS
            if failed_at is not None and time.monotonic() - failed_at > grace:
                break
    finally:
        for rank in ranks:
            rank.end()
        for rank in ranks:
            rank.wait(TERM_SECONDS * 2 + 5)
    failed = [member for rank in ranks for member in rank.members if member.code]
    # A rank ended by the guard or the launcher is not to blame, whenever its end was noticed. If
    # there are no others, the guard's words are about one that the launcher had to end.
    return sorted(failed, key=lambda r: (r.code == EXIT_CODE, r.was_ended, r.ended or 0.0))


def start_workers(
    hosts: Sequence[Host],
    program: Sequence[str],
    python: str,
    variables: Mapping[str, str] | None = None,
) -> list[RankProcess]:
    """Starts the workers of a `MultiWorkerMirroredStrategy`, each with its TF_CONFIG.

    Args:
        hosts: Hosts and their numbers of ranks.
        program: Script and its arguments.
        python: Path of the interpreter, the same on all hosts.
        variables: More environment variables of the workers.
    """
    slots = [(host, local_rank) for host in hosts for local_rank in range(host.ranks)]
    ports = [port for host in hosts for port in free_ports_of(host, python)]
    alone = all(host.is_local for host in hosts)
    addresses = [
        f"{'127.0.0.1' if alone else host.name}:{port}"
        for (host, _), port in zip(slots, ports, strict=True)
    ]
    ranks = []
    for index, (host, local_rank) in enumerate(slots):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        local = topology.local_variables(local_rank, host.ranks)
        changes = {**(variables or {}), "TF_CONFIG": json.dumps(config), **local}
        command = [python, "-m", "tfdml.runtime.launch.supervisor", python, *program]
        if not host.is_local:
            command = remote_command(host, command, {**quiet_variables(), **changes})
        terminal = index == 0 and host.is_local and sys.stdout.isatty()
        ranks.append(RankProcess(f"rank {index}", f"[{index}] ", command, changes, terminal))
    return ranks


def start_alone(
    program: Sequence[str], python: str, variables: Mapping[str, str]
) -> list[RankProcess]:
    """Starts a script on this machine as a job of one process.

    Args:
        program: Script and its arguments.
        python: Path of the interpreter.
        variables: Environment variables of the process.
    """
    command = [python, "-m", "tfdml.runtime.launch.supervisor", python, *program]
    return [RankProcess("the script", "", command, dict(variables), terminal=False)]


def start_horovod(
    hosts: Sequence[Host],
    program: Sequence[str],
    python: str,
    variables: Mapping[str, str] | None = None,
) -> list[RankProcess]:
    """Starts `horovodrun`, which starts the ranks itself.

    Args:
        hosts: Hosts and their numbers of ranks.
        program: Script and its arguments.
        python: Path of the interpreter, the same on all hosts.
        variables: More environment variables of the ranks.

    Raises:
        FileNotFoundError: If `horovodrun` is not in the interpreter's directory.
    """
    horovodrun = Path(python).with_name("horovodrun")
    if not horovodrun.exists():
        raise FileNotFoundError(
            f"`horovodrun` must be installed next to {python}. Received: no {horovodrun}. Run "
            f"`tfdml build-horovod`."
        )
    size = sum(host.ranks for host in hosts)
    where = []
    if not all(host.is_local for host in hosts):
        where = ["-H", ",".join(f"{host.name}:{host.ranks}" for host in hosts)]
    supervisor = [python, "-m", "tfdml.runtime.launch.supervisor"]
    # A rank on another machine must not outlive the `ssh` that started it.
    rank = [*supervisor, "--watch-output", python, *program]
    supervised = [*supervisor, python, str(horovodrun), "-np", str(size), *where, *rank]
    return [HorovodRun(supervised, dict(variables or {}))]
