"""A machine that is about to be taken away: SIGTERM, or a notice that a watcher looks for."""

import signal
import threading
from collections.abc import Callable

# Between two calls of a watcher.
SECONDS = 5.0


class Preemption:
    """Notes that this process has been asked to end; what comes of it, the trainer decides.

    Args:
        watcher: Called every few seconds beside training; returns whether there is a notice.
    """

    def __init__(self, watcher: Callable[[], bool] | None = None):
        self._watcher = watcher
        self._asked = threading.Event()
        self._over = threading.Event()
        self._previous = None

    @property
    def asked(self) -> bool:
        """Whether there was a signal or a notice."""
        return self._asked.is_set()

    def start(self) -> None:
        """Begins to listen; signals reach the main thread only."""
        self._over.clear()
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        if self._watcher is not None:
            threading.Thread(target=self._watch, name="tfdml-preemption", daemon=True).start()

    def stop(self) -> None:
        """Ends listening."""
        self._over.set()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_signal(self, number, frame) -> None:
        # A second one changes nothing: the save that the first has asked for goes on.
        self._asked.set()

    def _watch(self) -> None:
        while not self._over.wait(SECONDS):
            if self._watcher():
                self._asked.set()
                return
