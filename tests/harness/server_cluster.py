"""Cluster of real processes: a chief that runs cases, with workers and parameter servers."""

import json
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from tests.harness.pool import RankFailure, RankPool
from tfdml.runtime.launch.supervisor import free_ports

SERVE_SECONDS = 7200.0
# A fork server forks one process at a time.
_STARTING = threading.Lock()


def serve(silence_limit: float = 60.0) -> int:
    """Case of a worker or server: serves as `tfdml serve` does."""
    from tfdml.runtime.servers.server import serve
    from tfdml.runtime.servers.server_task import task_from_environment

    return serve(task_from_environment(), start_limit=120.0, silence_limit=silence_limit)


class ServerCluster:
    """Processes of one job.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        absent: Tasks that are not started.
    """

    def __init__(self, workers: int = 2, servers: int = 2, absent: Sequence[tuple[str, int]] = ()):
        ports = free_ports(1 + workers + servers)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.cluster = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + workers],
            "ps": addresses[1 + workers :],
        }
        self._pools: dict[tuple[str, int], RankPool] = {}
        self.codes: dict[tuple[str, int], Any] = {}
        for role in ("worker", "ps"):
            for index in range(len(self.cluster[role])):
                if (role, index) not in absent:
                    self.start(role, index)
        self._pools["chief", 0] = self._pool("chief", 0)

    def _pool(self, role: str, index: int) -> RankPool:
        pool = RankPool(1)
        config = {"cluster": self.cluster, "task": {"type": role, "index": index}}
        pool._environment |= {
            "TF_CONFIG": json.dumps(config),
            "TFDML_TEST_KIND": "parameter_server",
        }
        return pool

    def start(self, role: str, index: int) -> None:
        """Starts a worker or server."""
        self._pools[role, index] = pool = self._pool(role, index)
        with _STARTING:
            pool._start()

        def run() -> None:
            try:
                (self.codes[role, index],) = pool.run(serve, timeout=SERVE_SECONDS)
            except (RankFailure, OSError) as error:
                self.codes[role, index] = error

        threading.Thread(target=run, daemon=True).start()

    def run(self, case: Any, *args: Any, timeout: float = 180.0) -> Any:
        """Runs a case on the chief; returns its result."""
        try:
            (result,) = self._pools["chief", 0].run(case, *args, timeout=timeout)
        except RankFailure as error:
            exit_codes = [f"{role} {i}: {code}" for (role, i), code in self.codes.items()]
            raise RankFailure("\n".join([str(error), *exit_codes]), error.errors) from None
        return result

    def send(self, role: str, index: int, number: signal.Signals) -> None:
        """Sends a process a signal."""
        os.kill(self._pools[role, index].pids[0], number)

    def pid(self, role: str, index: int) -> int:
        """Returns a process's id."""
        return self._pools[role, index].pids[0]

    def output(self, role: str, index: int) -> str:
        """Returns the output of a process."""
        return self._pools[role, index]._log.read_text(errors="replace")

    def close(self) -> None:
        """Ends all processes."""
        for pool in self._pools.values():
            pool.close()


class ChiefPool:
    """Cluster in the role of a pool with one rank, the chief: it runs the contract's cases.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._cluster: ServerCluster | None = None

    def run(self, case: Any, *args: Any, timeout: float = 180.0) -> list:
        """Runs a case on the chief; returns its result in a list."""
        if self._cluster is None:
            self._cluster = ServerCluster(self._workers)
        return [self._cluster.run(case, *args, timeout=timeout)]

    def close(self, keep_output: bool = False) -> None:
        """Ends all processes; the next case starts new ones."""
        del keep_output
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
