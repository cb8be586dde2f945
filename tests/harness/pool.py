"""Pool of real ranks, started once for many cases, each with a time limit."""

import json
import os
import pickle
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.harness.forkserver import FORK_SERVERS, fork_server
from tfdml.runtime.launch.horovod_rendezvous import HorovodRendezvous
from tfdml.runtime.launch.processes import alive, end_processes, process_tree
from tfdml.runtime.launch.supervisor import free_ports
from tfdml.topology import job_variables

START_SECONDS = 180.0  # TensorFlow's import, on a loaded machine.
# Time limit for hangs. A case takes seconds; on a busy machine, a minute.
CASE_SECONDS = 180.0
# Between SIGTERM and SIGKILL.
TERM_SECONDS = 3.0
GRACE_SECONDS = 10.0  # How long ranks may outlive one that failed: the guard ends them.


class RankFailure(AssertionError):
    """Failure of a case, with the errors and the output of the ranks.

    Attributes:
        errors: Traceback of each rank that raised, by rank.
    """

    def __init__(self, message: str, errors: dict[int, str]):
        super().__init__(message)
        self.errors = errors


class RankPool:
    """Ranks of one job that wait for cases.

    Args:
        size: Number of replicas.
        kind: "horovod" (size 1 is a plain process; more meet as under `horovodrun`),
            "multi_worker" (processes of a TensorFlow cluster) or "mirrored" (devices of one
            process, which is then the only rank).
        hosts: Number of hosts among which the ranks seem to be divided, 1 to 3: each has another
            name of this machine, and the first ones more ranks if they are uneven.
    """

    def __init__(self, size: int, kind: str = "horovod", hosts: int = 1):
        self.size = 1 if kind == "mirrored" else size
        self._kind = kind
        each, more = divmod(self.size, hosts)
        names = ("127.0.0.1", "localhost", "127.0.0.2")[:hosts]
        self._ranks_of = {name: each + (i < more) for i, name in enumerate(names)}
        self.pids: list[int] = []
        self._connections: dict[int, Connection] = {}
        self._rendezvous: HorovodRendezvous | None = None
        self._closing = threading.Lock()
        self._directory = tempfile.TemporaryDirectory(prefix="tfdml-ranks-")
        self._log = Path(self._directory.name, "output")
        self._environment = {
            "TFDML_TEST_KIND": kind,
            "TFDML_TEST_SIZE": str(size),
            **job_variables(str(Path(self._directory.name, "job"))),
        }

    def run(self, case: Callable, *args: Any, timeout: float = CASE_SECONDS) -> list:
        """Runs `case(*args)` on all ranks simultaneously.

        Args:
            case: Function of a module, the same for all ranks.
            *args: Its arguments; picklable.
            timeout: Seconds until the ranks are killed and the case has failed.

        Returns:
            The results of all ranks, by rank.

        Raises:
            RankFailure: If a rank raised, died, or did not answer in time. The ranks are ended
                unless all of them raised; the next case starts new ones.
        """
        if not self._connections:
            self._start()
        log_start = self._log.stat().st_size
        for connection in self._connections.values():
            connection.send((case.__module__, case.__qualname__, args))
        answers = self._answers(timeout)
        errors = {rank: answer for rank, (ok, answer) in answers.items() if not ok}
        silent = sorted(set(range(self.size)) - set(answers))
        if not errors and not silent:
            return [answers[rank][1] for rank in range(self.size)]
        if len(errors) < self.size:
            self.close(keep_output=True)
        failures = [f"rank {rank} raised:\n{text}" for rank, text in sorted(errors.items())]
        if silent:
            failures.append(f"ranks {silent} did not answer within {timeout} s, or died")
        output = self._log.read_bytes()[log_start:].decode(errors="replace")
        raise RankFailure(
            "\n".join(
                [f"{case.__qualname__} failed on {self.size} ranks.", *failures, output[-8000:]]
            ),
            errors,
        )

    def close(self, keep_output: bool = False) -> None:
        """Ends all processes of the pool: SIGTERM, then SIGKILL."""
        # A failed case in another thread closes the pool too.
        with self._closing:
            end_processes([pid for own in self.pids for pid in process_tree(own)], TERM_SECONDS)
            for connection in self._connections.values():
                connection.close()
            if self._rendezvous is not None:
                self._rendezvous.stop()
            self._connections, self._rendezvous, self.pids = {}, None, []
        if not keep_output:
            self._directory.cleanup()

    def _start(self) -> None:
        address = str(Path(self._directory.name, f"socket-{secrets.token_hex(4)}"))
        key = secrets.token_bytes(16)
        common = {**os.environ, **self._environment, "TFDML_TEST_KEY": key.hex()}
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            for rank, own in enumerate(self._environments()):
                server = fork_server(rank % FORK_SERVERS)
                self.pids.append(server.fork(address, {**common, **own}, self._log))
            # `accept` must not wait for a rank that never connects.
            listener._listener._socket.settimeout(1.0)
            deadline = time.monotonic() + START_SECONDS
            while len(self._connections) < self.size:
                if len(alive(self.pids)) < self.size or time.monotonic() > deadline:
                    output = self._log.read_text(errors="replace")[-8000:]
                    self.close(keep_output=True)
                    raise RankFailure(f"{self.size} ranks did not start.\n{output}", {})
                try:
                    connection = listener.accept()
                except TimeoutError:
                    continue
                self._connections[connection.recv()] = connection

    def _environments(self) -> list[dict[str, str]]:
        """Returns the environment that a launcher would give each rank."""
        if self._kind == "multi_worker":
            names = [name for name, own in self._ranks_of.items() for _ in range(own)]
            workers = [f"{n}:{p}" for n, p in zip(names, free_ports(self.size), strict=True)]
            return [
                {"TF_CONFIG": json.dumps(config), "TFDML_TEST_RANK": str(rank)}
                for rank in range(self.size)
                for config in [
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ]
            ]
        if self.size == 1:
            return [{}]
        return self._horovod_environments()

    def _horovod_environments(self) -> list[dict[str, str]]:
        """Replaces `horovodrun`, which cannot fork ranks."""
        self._rendezvous = HorovodRendezvous(list(self._ranks_of.items()), "127.0.0.1")
        # An idle rank polls for exchanges all the time. Every millisecond, the default, costs a
        # tenth of a core.
        more = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_GLOO_IFACE": "lo"}
        return [{**own, **more} for own in self._rendezvous.variables()]

    def _answers(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Collects the ranks' answers until all have arrived or the time is over."""
        answers: dict[int, tuple[bool, Any]] = {}
        gone: set[int] = set()
        deadline = time.monotonic() + timeout
        while len(answers) + len(gone) < self.size:
            waiting = {c: r for r, c in self._connections.items() if r not in answers.keys() | gone}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    gone.add(rank)
                if rank in gone or not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers


def _new_pool(size: int, kind: str, hosts: int) -> Any:
    if kind != "parameter_server":
        return RankPool(size, kind, hosts)
    from tests.harness.server_cluster import ChiefPool  # Imports this module.

    return ChiefPool(size)


class RankPools:
    """Pools of a test session, by size and kind.

    At most `limit` run at once, because idle ranks use memory and some CPU time.
    """

    def __init__(self, limit: int = 4) -> None:
        self._limit = limit
        self._pools: dict[tuple[int, str, int], RankPool] = {}
        self._remembered: dict[tuple, list] = {}

    def __call__(self, size: int, kind: str = "horovod", hosts: int = 1) -> RankPool:
        """Returns the pool of `size` replicas of a kind, on up to three hosts.

        For `ParameterServerStrategy` it is the chief of a cluster with `size` workers.
        """
        if size == 1:
            kind = "horovod"  # A single replica is a plain process for every strategy.
        key = size, kind, hosts
        pool = self._pools.pop(key, None) or _new_pool(*key)
        self._pools[key] = pool  # Moves it to the end: the order is that of last use.
        for other in list(self._pools.values())[: -self._limit]:
            other.close(keep_output=True)
        return pool

    def run_sizes(
        self, sizes: Sequence[int], case: Callable, *args: Any, kind: str = "horovod", **kwargs: Any
    ) -> dict:
        """Runs a case on jobs of several sizes; returns the lists of results by size.

        Results are cached: tests that compare with the same run do not repeat it.
        """
        results = {}
        for size in sizes:
            # A single replica is the same for every strategy.
            kind_of_size = kind if size > 1 else None
            key = (size, kind_of_size, pickle.dumps((case, args, kwargs)))
            if key not in self._remembered:
                self._remembered[key] = self(size, kind).run(case, *args, **kwargs)
            results[size] = self._remembered[key]
        return results

    def close(self) -> None:
        """Ends all pools."""
        for pool in self._pools.values():
            pool.close()
