"""Forks ranks from a process that has only imported TensorFlow, so that they start quickly.

TensorFlow's import takes most of a rank's start. A fork server imports it once and waits; it never
uses it, because a TensorFlow that has started its threads does not survive a fork. Each rank is
nevertheless a separate process, with the environment that its launcher would give it.
"""

import contextlib
import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A rank inherits its fork server's hash seed: with two, ranks iterate over sets in two orders.
FORK_SERVERS = 2

_PR_SET_PDEATHSIG = 1


class ForkServer:
    """This process's end of a fork server, which lives as long as this process."""

    def __init__(self) -> None:
        self._orders, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.forkserver", str(other.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def fork(self, address: str, environment: dict[str, str], log: Path) -> int:
        """Starts a rank.

        Args:
            address: Address of its pool's socket.
            environment: All environment variables of the rank.
            log: File to which its output is appended.

        Returns:
            Its process id.

        Raises:
            EOFError: If the fork server has died.
        """
        self._orders.send((address, environment, str(log)))
        return self._orders.recv()


@functools.cache
def fork_server(number: int) -> ForkServer:
    """Returns one of this process's fork servers, which is started on first use."""
    return ForkServer()


def serve(orders: Connection) -> None:
    """Forks a rank for every request, until the other end closes."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import tfdml.strategies  # noqa: F401
    from tests.harness import rank

    with contextlib.suppress(ImportError):  # Only needed by Horovod jobs.
        import horovod.tensorflow  # noqa: F401

    gc.freeze()  # The ranks share these pages as long as nobody writes to them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Ended ranks are not waited for.
    with contextlib.suppress(EOFError):
        while True:
            address, environment, log = orders.recv()
            pid = os.fork()
            if pid == 0:
                orders.close()
                _become_a_rank(environment, log)
                _run(rank.main, address)
            orders.send(pid)


def _become_a_rank(environment: dict[str, str], log: str) -> None:
    """Makes this fork look like a process started by a launcher."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)


def _run(main, address: str) -> None:
    code = 1
    try:
        main(address)
        code = 0
    except BaseException:  # noqa: BLE001 (the fork must not continue as a fork server)
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
