"""Process that forks one process for each trial, so that each starts with the same memory.

TensorFlow's import takes seconds. This process imports it once and never uses it, because a
TensorFlow that has started its threads does not survive a fork.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection, Pipe

import psutil

from tfdml.batch_size.trial import TrialOutcome, TrialSetting, end_with_parent, train

# Seconds between looks at a trial's memory: about as long as it takes to write 100 MB.
_LOOK_SECONDS = 0.01
# What the C++ library writes when an allocation fails outside of TensorFlow's operations.
_NO_MEMORY = b"bad_alloc"
_LAST_BYTES = 2000


def serve(orders: Connection) -> None:
    """Runs a trial for each number of rows received, until the other end closes."""
    end_with_parent()
    with contextlib.suppress(EOFError):
        setting: TrialSetting = orders.recv()
        while True:
            orders.send(run_trial(setting, orders.recv()))


def run_trial(setting: TrialSetting, rows: int) -> TrialOutcome:
    """Runs a trial in a process of its own, and kills it if it takes more than it may.

    Args:
        setting: Setting of the trial.
        rows: Rows of a batch.
    """
    written = os.fstat(sys.stderr.fileno()).st_size
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            sender.send(train(setting, rows))
        except BaseException:  # noqa: BLE001 (the fork must not go on as this server)
            traceback.print_exc()
        finally:
            os._exit(0)
    sender.close()
    status, growth = _watched(pid, setting.host_limit)
    if setting.host_limit is not None and growth > setting.host_limit:
        return TrialOutcome(False)
    with contextlib.suppress(EOFError):
        return receiver.recv()
    output = os.pread(sys.stderr.fileno(), 1 << 24, written)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if killed or _NO_MEMORY in output:
        return TrialOutcome(False)
    ended = f"The process of the trial ended with status {status}."
    return TrialOutcome(False, f"{ended}\n{output[-_LAST_BYTES:].decode(errors='replace')}")


def _watched(pid: int, limit: int | None) -> tuple[int, int]:
    """Waits until a trial has ended; returns its status and the most bytes that it has taken."""
    process = psutil.Process(pid)
    before, most = _own_bytes(psutil.Process()), 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, most
        most = max(most, _own_bytes(process) - before)
        if limit is not None and most > limit:
            process.kill()
        time.sleep(_LOOK_SECONDS)


def _own_bytes(process: psutil.Process) -> int:
    """Returns a process's memory without the pages of libraries, which a fork has not read yet."""
    memory = process.memory_info()
    return memory.rss - memory.shared


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
