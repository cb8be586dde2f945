"""Starts a job's ranks, shows their output, and ends all of them when one fails."""

import collections
import dataclasses
import ipaddress
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from tfdml import topology
from tfdml.runtime.immediate_exit import EXIT_CODE, PREEMPTED_EXIT_CODE
from tfdml.runtime.launch.held_errors import HeldErrors
from tfdml.runtime.launch.supervisor import TERM_SECONDS, free_ports
from tfdml.runtime.startup_noise import is_noise

# Seconds that the other ranks get to end by themselves after one has failed.
GRACE_SECONDS = 10.0
# Grace after an error of a rank's script, for which the guard ends the others before that rank.
_ERROR_GRACE_SECONDS = 1.2
_LAST_LINES = 30
_CONTINUED = re.compile(r"tfdml: epoch \d+ (?:continues at step \d+|has finished), from")
# Lines of `horovodrun`, with and without a rank's prefix.
_OF_RANK = re.compile(r"\[(\d+)\]<std(?:out|err)>:(.*)")
_END_OF_RANK = re.compile(r"Process (\d+) exit with status code (\d+)\.$")
_ENDED_BY_SIGNAL = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
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


def gather(hosts: Sequence[Host], fewest: int, seconds: float = 300.0) -> list[Host]:
    """Waits until enough hosts answer to restart a job.

    Args:
        hosts: Hosts of the job.
        fewest: Minimum number of ranks to restart with.
        seconds: Seconds to wait.

    Returns:
        The hosts that answer.

    Raises:
        ConnectionError: If they have fewer than `fewest` ranks after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        there = [host for host in hosts if _answers(host)]
        ranks = sum(host.ranks for host in there)
        if ranks >= fewest:
            return there
        if time.monotonic() > deadline:
            missing = ", ".join(host.name for host in hosts if host not in there)
            raise ConnectionError(
                f"`--min-workers` processes must have a host that answers, to restart the job. "
                f"Received: {ranks} of {fewest} after {seconds:.0f} s; no answer from {missing}. "
                f"Bring these machines back, or ask for fewer."
            )
        time.sleep(2.0)


def _answers(host: Host) -> bool:
    if host.is_local:
        return True
    try:
        return not subprocess.run(
            [*_SSH, host.name, "true"], capture_output=True, stdin=subprocess.DEVNULL, timeout=20
        ).returncode
    except subprocess.TimeoutExpired:
        return False


class RankProcess:
    """A started process of a job, as the launcher sees it.

    Args:
        label: Name in messages, such as "rank 0".
        prefix: Prefix of its output lines.
        command: Command to start on this machine: the supervisor, or ssh.
        changes: Environment variables of this process.
        terminal: Whether its standard output is a terminal, so that it shows a progress bar.

    Attributes:
        last_lines: Its last lines of output.
        continued: Epoch and step at which it resumed from a checkpoint; None without one.
        was_ended: Whether the launcher has ended it.
    """

    def __init__(
        self,
        label: str,
        prefix: str,
        command: Sequence[str],
        changes: dict[str, str],
        terminal: bool,
    ):
        self.label = label
        self._prefix = prefix
        self.last_lines = _last_lines()
        self.continued: str | None = None
        self.ended: float | None = None
        self.was_ended = False
        master, slave = pty.openpty() if terminal else (None, subprocess.PIPE)
        self._process = subprocess.Popen(
            command,
            env=topology.child_environment(**{**_quiet(), **changes}),
            stdin=subprocess.PIPE,
            stdout=slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [self._read_by(self._copy_lines, self._process.stderr, sys.stderr)]
        if terminal:
            os.close(slave)
            self._readers.append(self._read_by(self._copy_terminal, master))
        else:
            self._readers.append(self._read_by(self._copy_lines, self._process.stdout, sys.stdout))

    @property
    def code(self) -> int | None:
        """Exit code; None while the process runs. 128 plus the number of a signal that ended it."""
        code = self._process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code if code is None or code >= 0 else 128 - code

    @property
    def members(self) -> Sequence["RankProcess | HorovodRank"]:
        """The ranks of which this process consists, for reports: itself."""
        return [self]

    def end(self) -> None:
        """Closes the supervisor's input: it then ends the process and all its descendants."""
        self.was_ended = self.code is None
        self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Waits for the end and the last output; kills the supervisor after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def _read_by(self, target: Callable, *args: object) -> threading.Thread:
        reader = threading.Thread(target=target, args=args, daemon=True)
        reader.start()
        return reader

    def _copy_lines(self, source: IO[bytes], sink: IO[str]) -> None:
        lines = HeldErrors(lambda line: self._show(line, sink))
        for raw in source:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if not is_noise(line):
                lines.take(line)
        lines.release()

    def _show(self, line: str, sink: IO[str]) -> None:
        self.last_lines.append(line)
        self.continued = _continued(line) or self.continued
        # One call, so that lines of two ranks do not mix, however the sink is buffered.
        sink.write(f"{self._prefix}{line}\n")
        sink.flush()

    def _copy_terminal(self, master: int) -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # The other end has closed.
                return
            self.last_lines.extend(data.decode(errors="replace").splitlines())
            sys.stdout.buffer.write(data)
            sys.stdout.flush()


@dataclasses.dataclass
class HorovodRank:
    """A rank that `horovodrun` has started; the attributes are those of `RankProcess`."""

    label: str
    last_lines: collections.deque[str]
    code: int | None = None
    ended: float | None = None
    was_ended: bool = False
    continued: str | None = None


class HorovodRun(RankProcess):
    """Process of `horovodrun`, which says how each of its ranks has ended.

    Its own traceback about that is not shown: the report has the rank that failed.
    """

    def __init__(self, command: Sequence[str]):
        self._ranks: dict[int, HorovodRank] = {}
        self._is_over = False
        super().__init__("horovodrun", "", command, {}, terminal=False)

    @property
    def members(self) -> Sequence[RankProcess | HorovodRank]:
        """The ranks whose end is known; `horovodrun` itself if none is."""
        return list(self._ranks.values()) if self._is_over else [self]

    def _rank(self, number: str) -> HorovodRank:
        return self._ranks.setdefault(int(number), HorovodRank(f"rank {number}", _last_lines()))

    def _show(self, line: str, sink: IO[str]) -> None:
        if found := _OF_RANK.match(line):
            rank = self._rank(found[1])
            rank.last_lines.append(found[2])
            rank.continued = _continued(line) or rank.continued
        elif found := _END_OF_RANK.match(line):
            rank, code = self._rank(found[1]), int(found[2])
            # It ends the others after the first.
            rank.was_ended = self._is_over and code in _ENDED_BY_SIGNAL
            rank.code, rank.ended = code, time.monotonic()
            self._is_over = True
            return
        elif self._is_over:
            return
        super()._show(line, sink)


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


def is_script_error(code: int) -> bool:
    """Returns whether an exit code is the script's own: no signal's and none of the guard's."""
    return 0 < code <= 128 and code not in (EXIT_CODE, PREEMPTED_EXIT_CODE)


def explain(failed: Sequence[RankProcess | HorovodRank]) -> str:
    """Returns the failure report: the rank to blame with its last lines, then the others."""
    first, *others = failed
    lines = [f"tfdml launch: {first.label} failed: {in_words(first)}. Its last lines:"]
    lines += [f"    {line}" for line in first.last_lines]
    lines += [f"{rank.label}: {in_words(rank)}" for rank in others]
    return "\n".join(lines)


def in_words(rank: RankProcess | HorovodRank) -> str:
    """Describes how a rank ended."""
    code = rank.code
    if rank.was_ended:
        return f"did not end by itself, and was stopped (exit code {code})"
    if code == PREEMPTED_EXIT_CODE:
        return f"was asked to end, and has saved its state (exit code {code})"
    if code == EXIT_CODE:
        return f"ended because another rank could not continue (exit code {code})"
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"exit code {code}"


def start_workers(hosts: Sequence[Host], program: Sequence[str], python: str) -> list[RankProcess]:
    """Starts the workers of a `MultiWorkerMirroredStrategy`, each with its TF_CONFIG.

    Args:
        hosts: Hosts and their numbers of ranks.
        program: Script and its arguments.
        python: Path of the interpreter, the same on all hosts.
    """
    slots = [(host, local_rank) for host in hosts for local_rank in range(host.ranks)]
    ports = [port for host in hosts for port in _free_ports_of(host, python)]
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
        changes = {"TF_CONFIG": json.dumps(config), **local}
        command = [python, "-m", "tfdml.runtime.launch.supervisor", python, *program]
        if not host.is_local:
            command = [*_SSH, host.name, _remote(command, changes)]
        terminal = index == 0 and host.is_local and sys.stdout.isatty()
        ranks.append(RankProcess(f"rank {index}", f"[{index}] ", command, changes, terminal))
    return ranks


def start_horovod(hosts: Sequence[Host], program: Sequence[str], python: str) -> list[RankProcess]:
    """Starts `horovodrun`, which starts the ranks itself.

    Raises:
        FileNotFoundError: If `horovodrun` is not in the interpreter's directory.
    """
    launcher = Path(python).with_name("horovodrun")
    if not launcher.exists():
        raise FileNotFoundError(
            f"`horovodrun` must be installed next to {python}. Received: no {launcher}. Run "
            f"`tfdml build-horovod`."
        )
    size = sum(host.ranks for host in hosts)
    where = []
    if not all(host.is_local for host in hosts):
        where = ["-H", ",".join(f"{host.name}:{host.ranks}" for host in hosts)]
    supervisor = [python, "-m", "tfdml.runtime.launch.supervisor"]
    # A rank on another machine must not outlive the `ssh` that started it.
    rank = [*supervisor, "--watch-output", python, *program]
    supervised = [*supervisor, python, str(launcher), "-np", str(size), *where, *rank]
    return [HorovodRun(supervised)]


def _free_ports_of(host: Host, python: str) -> list[int]:
    if host.is_local:
        return free_ports(host.ranks)
    ask = [python, "-m", "tfdml.runtime.launch.supervisor", "--free-ports", str(host.ranks)]
    answer = subprocess.run(
        [*_SSH, host.name, _remote(ask, {})], capture_output=True, text=True, timeout=60
    )
    if answer.returncode:
        raise ConnectionError(
            f"`hosts` must be reachable by ssh without a password, with tfdml installed in the "
            f"same place. Received from {host.name}: {answer.stderr.strip()[-500:]}"
        )
    return [int(port) for port in answer.stdout.split()]


def _last_lines() -> collections.deque[str]:
    return collections.deque(maxlen=_LAST_LINES)


def _continued(line: str) -> str | None:
    """Returns where a rank continues, if a line of `FaultTolerantCheckpoint` says so."""
    found = _CONTINUED.search(line)
    return found and found[0]


def _quiet() -> dict[str, str]:
    """Returns variables that unbuffer a rank's output and hide TensorFlow's information lines."""
    level = topology.setting("TF_CPP_MIN_LOG_LEVEL", "2")
    return {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": level}


def _remote(command: Sequence[str], changes: dict[str, str]) -> str:
    """Returns the shell command for another machine: same directory, with variables `changes`."""
    variables = [f"{name}={value}" for name, value in {**_quiet(), **changes}.items()]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *variables, *command])}"
