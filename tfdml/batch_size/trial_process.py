"""The rank's end of the process that runs trials."""

import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from typing import IO

from tfdml.batch_size.trial import TrialOutcome, TrialSetting
from tfdml.topology import child_environment


class TrialProcess:
    """Process that runs trials; a context manager.

    Args:
        setting: Setting of all trials.
    """

    def __init__(self, setting: TrialSetting):
        self._setting = setting
        self._orders: Connection
        self._output: IO[bytes]
        self._process: subprocess.Popen

    def __enter__(self) -> "TrialProcess":
        self._output = tempfile.TemporaryFile()
        self._orders, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tfdml.batch_size.trial_server", str(other.fileno())],
                env=child_environment(PYTHONPATH=":".join(path for path in sys.path if path)),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[other.fileno()],
            )
        self._orders.send(self._setting)
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._process.kill()
        self._process.wait()
        self._output.close()

    def run(self, rows: int) -> TrialOutcome:
        """Runs a trial.

        Args:
            rows: Rows of a batch of this process.
        """
        try:
            self._orders.send(rows)
            return self._orders.recv()
        except (EOFError, ConnectionError):
            self._output.seek(0)
            output = self._output.read()[-2000:].decode(errors="replace")
            return TrialOutcome(False, f"The process that runs trials has ended.\n{output}")
