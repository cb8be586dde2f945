"""Thread that takes what graphs have noted about their exchanges."""

import threading

from tfdml.runtime.hang_report.exchange_log import ExchangeLog
from tfdml.runtime.hang_report.graph_events import BATCH

# Seconds between two collections.
_SECONDS = 1.0


class ExchangeCollector:
    """Thread that regularly has a log take the notes of graphs, so that they do not pile up.

    Args:
        log: Record of this process's exchanges.
    """

    def __init__(self, log: ExchangeLog):
        self._log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdml-exchanges", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            self._log.collect(at_least=BATCH)

    def close(self) -> None:
        """Ends the thread: the interpreter must not end while one is in TensorFlow."""
        self._ended.set()
        self._thread.join(_SECONDS)
