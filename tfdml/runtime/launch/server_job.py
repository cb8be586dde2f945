"""Local job with parameter servers: a chief that runs the script, servers and workers.

Unlike a rank, a worker may be lost: the job continues without it, and the worker is restarted. So
is a server, for which a chief may wait; see `restart_limit` of `ParameterServerStrategy`.
"""

import json
import sys
import time
from collections.abc import Sequence

from tfdml.runtime.immediate_exit import EXIT_CODE
from tfdml.runtime.launch.launcher import GRACE_SECONDS
from tfdml.runtime.launch.rank_process import RankProcess, in_words
from tfdml.runtime.launch.restarts import run_with_restarts
from tfdml.runtime.launch.supervisor import TERM_SECONDS, free_ports
from tfdml.runtime.servers.server_task import CHIEF, SERVER, WORKER, name_of
from tfdml.topology import local_variables

_POLL_SECONDS = 0.05
# A task that dies again and again has a fault that a restart does not fix.
_MOST_RESTARTS = 3
# A server that died so long before the chief is not to blame for its end.
_BLAME_SECONDS = 60.0


class ServerJob:
    """Processes of one job.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        program: Script and its arguments.
        python: Path of the interpreter.
    """

    def __init__(self, workers: int, servers: int, program: Sequence[str], python: str):
        ports = [f"127.0.0.1:{port}" for port in free_ports(1 + workers + servers)]
        self._cluster = {
            CHIEF: ports[:1],
            WORKER: ports[1 : 1 + workers],
            SERVER: ports[1 + workers :],
        }
        self._python = python
        serve = ["-m", "tfdml.cli.main", "serve"]
        self._tasks = {
            (role, index): self._start(role, index, serve)
            for role in (SERVER, WORKER)
            for index in range(len(self._cluster[role]))
        }
        self._chief = self._start(CHIEF, 0, program)
        self._restarts = dict.fromkeys(self._tasks, 0)

    def _start(self, role: str, index: int, command: Sequence[str]) -> RankProcess:
        config = {"cluster": self._cluster, "task": {"type": role, "index": index}}
        changes = {"TF_CONFIG": json.dumps(config)}
        if role == WORKER:
            changes |= local_variables(index, len(self._cluster[WORKER]))
        label = name_of(role, index)
        return RankProcess(
            label,
            "" if role == CHIEF else f"[{role} {index}] ",
            [self._python, "-m", "tfdml.runtime.launch.supervisor", self._python, *command],
            changes,
            terminal=role == CHIEF and sys.stdout.isatty(),
        )

    def run(self) -> list[RankProcess]:
        """Waits for the chief, and restarts other tasks that die before it ends.

        Returns:
            The processes that failed, the one to blame first; [] if the chief did not fail.
        """
        lost: list[tuple[float, RankProcess]] = []
        try:
            while self._chief.code is None:
                time.sleep(_POLL_SECONDS)
                died = [(key, task) for key, task in self._tasks.items() if _died(task)]
                lost += [(time.monotonic(), task) for (role, _), task in died if role == SERVER]
                for key, task in died:
                    if self._chief.code is None:
                        self._replace(key, task)
            ended = time.monotonic()
            self._wait_for_ends()
        finally:
            everything = [self._chief, *self._tasks.values()]
            for process in everything:
                process.end()
            for process in everything:
                process.wait(TERM_SECONDS * 2 + 5)
        if not self._chief.code:
            return []
        return [*(task for when, task in lost if ended - when < _BLAME_SECONDS), self._chief]

    def _replace(self, key: tuple[str, int], dead: RankProcess) -> None:
        self._restarts[key] += 1
        again = self._restarts[key] <= _MOST_RESTARTS
        print(
            f"tfdml launch: {dead.label} failed: {in_words(dead)}. "
            + ("It is started again." if again else "It is not started again."),
            file=sys.stderr,
            flush=True,
        )
        dead.end()
        dead.wait(TERM_SECONDS)
        if again:
            self._tasks[key] = self._start(*key, ["-m", "tfdml.cli.main", "serve"])
        else:
            del self._tasks[key]

    def _wait_for_ends(self) -> None:
        """Gives the remaining processes `GRACE_SECONDS` to end by themselves."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(
            process.code is None for process in (self._chief, *self._tasks.values())
        ):
            time.sleep(_POLL_SECONDS)


def _died(task: RankProcess) -> bool:
    """Returns whether a task has failed by itself, not because of the chief."""
    return task.code not in (None, 0, EXIT_CODE)


def run_server_job(workers: int, servers: int, program: Sequence[str], max_restarts: int) -> int:
    """Runs a job, restarts it after failures, and returns the exit code.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        program: Script and its arguments.
        max_restarts: Maximum number of restarts after a failure.
    """

    def run() -> list[RankProcess]:
        return ServerJob(workers, servers, program, sys.executable).run()

    return run_with_restarts(run, max_restarts, exit_code=lambda failed: failed[-1].code)
