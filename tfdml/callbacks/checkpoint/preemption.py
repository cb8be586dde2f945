"""Preemption of a machine, noticed by SIGTERM or by a watcher function."""

import signal
import threading
from collections.abc import Callable

import keras

from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.stop_vote import StopVote

# Seconds between two calls of a watcher.
SECONDS = 5.0


class Preemption:
    """Records that this process was asked to end, and lets all ranks agree on it.

    Args:
        wanted: Whether to listen for SIGTERM; or a watcher function, called every few seconds in a
            thread, that returns whether there is a notice: then SIGTERM counts too.
    """

    def __init__(self, wanted: bool | Callable[[], bool]):
        self._wanted = bool(wanted)
        self._watcher = wanted if callable(wanted) else None
        self._asked = threading.Event()
        self._over = threading.Event()
        self._vote: StopVote | None = None
        self._previous = None

    def ignore(self) -> None:
        """Makes `start` install no SIGTERM handler and no watcher."""
        self._wanted = False

    def vote_with(self, model: keras.Model, size: int) -> None:
        """Lets the ranks of a model's job vote, with the metrics of each step."""
        self._vote = None
        if not self._wanted or size == 1:
            return
        session = get_session(model)
        self._vote = session.observer(StopVote)
        if self._vote is None:
            self._vote = StopVote()
            session.attach(self._vote)
        self._vote.reset()

    @property
    def agreed(self) -> bool:
        """Whether any rank was asked to end before the last step: the same on all ranks."""
        if self._vote is None:
            return self._asked.is_set()
        if self._asked.is_set():
            self._vote.request()
        return self._vote.decided

    def start(self) -> None:
        """Starts to listen; signals are handled only if called in the main thread."""
        if not self._wanted:
            return
        self._over.clear()
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        if self._watcher is not None:
            threading.Thread(target=self._watch, name="tfdml-preemption", daemon=True).start()

    def stop(self) -> None:
        """Stops listening."""
        self._over.set()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_signal(self, number, frame) -> None:
        # A second signal changes nothing: the save that the first one requested continues.
        self._asked.set()

    def _watch(self) -> None:
        while not self._over.wait(SECONDS):
            if self._watcher():
                self._asked.set()
                return
