"""A pool of real ranks, started once and fed many cases; always with a time limit."""

import json
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tfdml.runtime.processes import end_processes, tree_of
from tfdml.runtime.supervisor import free_ports

START_SECONDS = 90.0  # TensorFlow's import, on a loaded machine.
# Between SIGTERM and SIGKILL.
TERM_SECONDS = 3.0
GRACE_SECONDS = 10.0  # How long ranks may lag behind one that failed: the guard ends them.


class RankFailure(AssertionError):
    """A case failed: what each rank said, and what was printed.

    Attributes:
        errors: The traceback of each rank that raised, by rank.
    """

    def __init__(self, message: str, errors: dict[int, str]):
        super().__init__(message)
        self.errors = errors


class RankPool:
    """Ranks of one job that wait for cases.

    Args:
        size: The number of replicas.
        kind: What they are: "horovod" (1 is a plain process, more are started by `horovodrun`),
            "multi_worker" (processes of a TensorFlow cluster) or "mirrored" (devices of one
            process, which is then the only rank).
    """

    def __init__(self, size: int, kind: str = "horovod"):
        self.size = 1 if kind == "mirrored" else size
        self._kind = kind
        self._environment = {"TFDML_TEST_KIND": kind, "TFDML_TEST_SIZE": str(size)}
        self.pids: list[int] = []
        self._connections: dict[int, Connection] = {}
        self._launched: list[subprocess.Popen] = []
        self._directory = tempfile.TemporaryDirectory(prefix="tfdml-ranks-")
        self._log = Path(self._directory.name, "output")

    def run(self, case: Callable, *args: Any, timeout: float = 60.0) -> list:
        """Runs `case(*args)` on every rank at once.

        Args:
            case: A function of a module, the same for all ranks.
            *args: What it is given; picklable.
            timeout: Seconds until the ranks are killed and the case has failed.

        Returns:
            What the ranks returned, in their order.

        Raises:
            RankFailure: If a rank raised, died, or did not answer in time. The ranks are ended
                unless all of them raised; the next case starts new ones.
        """
        if not self._launched:
            self._start()
        printed = self._log.stat().st_size
        for connection in self._connections.values():
            connection.send((case.__module__, case.__qualname__, args))
        answers = self._answers(timeout)
        errors = {rank: answer for rank, (ok, answer) in answers.items() if not ok}
        silent = sorted(set(range(self.size)) - set(answers))
        if not errors and not silent:
            return [answers[rank][1] for rank in range(self.size)]
        if len(errors) < self.size:
            self.close(keep_output=True)
        said = [f"rank {rank} raised:\n{text}" for rank, text in sorted(errors.items())]
        if silent:
            said.append(f"ranks {silent} did not answer within {timeout} s, or died")
        output = self._log.read_bytes()[printed:].decode(errors="replace")
        raise RankFailure(
            "\n".join([f"{case.__qualname__} failed on {self.size} ranks.", *said, output[-8000:]]),
            errors,
        )

    def close(self, keep_output: bool = False) -> None:
        """Ends all processes of the pool: SIGTERM, then SIGKILL."""
        if self._launched:
            pids = [*(pid for p in self._launched for pid in tree_of(p.pid)), *self.pids]
            end_processes(pids, TERM_SECONDS)
            for process in self._launched:
                process.wait()
        for connection in self._connections.values():
            connection.close()
        self._connections, self._launched, self.pids = {}, [], []
        if not keep_output:
            self._directory.cleanup()

    def _start(self) -> None:
        address, key = (
            str(Path(self._directory.name, f"socket-{secrets.token_hex(4)}")),
            (secrets.token_bytes(16)),
        )
        root = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root), "TFDML_TEST_KEY": key.hex()}
        environment |= self._environment
        with Listener(address, "AF_UNIX", authkey=key) as listener, self._log.open("ab") as log:
            for command, own in self._commands(address):
                self._launched.append(
                    subprocess.Popen(
                        command,
                        cwd=root,
                        env={**environment, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            # A rank that never comes must not be waited for by `accept`.
            listener._listener._socket.settimeout(1.0)
            deadline = time.monotonic() + START_SECONDS
            while len(self._connections) < self.size:
                ended = any(process.poll() is not None for process in self._launched)
                if ended or time.monotonic() > deadline:
                    output = self._log.read_text(errors="replace")[-8000:]
                    self.close(keep_output=True)
                    raise RankFailure(f"{self.size} ranks did not start.\n{output}", {})
                try:
                    connection = listener.accept()
                except TimeoutError:
                    continue
                rank, pid = connection.recv()
                self._connections[rank] = connection
                self.pids.append(pid)

    def _commands(self, address: str) -> list[tuple[list[str], dict[str, str]]]:
        """Returns what is to be started: commands with variables of their own."""
        command = [sys.executable, "-m", "tests.harness.rank", address]
        if self._kind == "multi_worker":
            workers = [f"127.0.0.1:{port}" for port in free_ports(self.size)]
            return [
                (command, {"TF_CONFIG": json.dumps(config), "TFDML_TEST_RANK": str(rank)})
                for rank in range(self.size)
                for config in [
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ]
            ]
        if self.size > 1:
            horovodrun = str(Path(sys.executable).with_name("horovodrun"))
            command = [sys.executable, horovodrun, "-np", str(self.size), *command]
        return [(command, {})]

    def _answers(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Collects the ranks' answers until all came, or the time is over."""
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


class RankPools:
    """The pools of a test session, by size and kind.

    At most `limit` run at once, because waiting ranks keep their memory.
    """

    def __init__(self, limit: int = 7) -> None:
        self._limit = limit
        self._pools: dict[tuple[int, str], RankPool] = {}
        self._remembered: dict[tuple, list] = {}

    def __call__(self, size: int, kind: str = "horovod") -> RankPool:
        """Returns the pool of `size` replicas of a kind."""
        if size == 1:
            kind = "horovod"  # One replica is a plain process, whatever the strategy.
        pool = self._pools.pop((size, kind), None) or RankPool(size, kind)
        self._pools[size, kind] = pool  # The last one used is the last one in the order.
        for other in list(self._pools.values())[: -self._limit]:
            other.close(keep_output=True)
        return pool

    def run_sizes(
        self, sizes: Sequence[int], case: Callable, *args: Any, kind: str = "horovod", **kwargs: Any
    ) -> dict:
        """Runs a case on jobs of several sizes; returns the lists of results by size.

        What one replica gives is remembered: it is the same for every kind of strategy.
        """
        results = {}
        for size in sizes:
            key = (size, case.__qualname__, pickle.dumps((args, kwargs)))
            if size > 1 or key not in self._remembered:
                results[size] = self(size, kind).run(case, *args, **kwargs)
                if size == 1:
                    self._remembered[key] = results[size]
            else:
                results[size] = self._remembered[key]
        return results

    def close(self) -> None:
        """Ends all pools."""
        for pool in self._pools.values():
            pool.close()
