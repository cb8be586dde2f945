"""Preemption of a machine, noticed by SIGTERM, by a cloud's notice, or by a watcher function."""

import signal
import threading
from collections.abc import Callable

import keras

from tfdml.callbacks.checkpoint.directory_use import say
from tfdml.runtime.immediate_exit import PREEMPTED_EXIT_CODE
from tfdml.runtime.preemption_notices import ADDRESSES, preemption_notice
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.stop_vote import StopVote
from tfdml.topology import is_first_on_host, started_together

# Seconds between two calls of a watcher. EC2's document recommends 5.
SECONDS = 5.0


class Preemption:
    """Records that this process was asked to end, and lets all ranks agree on it.

    Args:
        wanted: Whether to listen for SIGTERM; or in addition a watcher function, called every few
            seconds in a thread, that returns whether there is a notice; or a cloud's name, whose
            metadata server is asked instead, by one process of each host.

    Raises:
        ValueError: If `wanted` is something else.
    """

    def __init__(self, wanted: bool | str | Callable[[], bool]):
        is_cloud = isinstance(wanted, str) and wanted in ADDRESSES
        if not (is_cloud or isinstance(wanted, bool) or callable(wanted)):
            raise ValueError(
                f"`on_preemption` must be True, False, a function, or a cloud, one of "
                f"{tuple(ADDRESSES)}. Received: on_preemption={wanted!r}."
            )
        self._wanted = wanted is not False
        self._watcher: Callable[[], bool] | None = wanted if callable(wanted) else None
        # Azure refuses more than 5 requests a second from a machine.
        if is_cloud and is_first_on_host():
            self._watcher = _CloudWatcher(wanted)
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

    def forget(self) -> None:
        """Forgets that a rank was asked to end; all ranks call this after the same step."""
        self._asked.clear()
        if self._vote is not None:
            self._vote.reset()

    def start(self) -> None:
        """Starts to listen; signals are handled only if called in the main thread."""
        if not self._wanted:
            return
        # A new one, because the last `fit`'s watcher may still be waiting for an answer.
        self._over = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        if self._watcher is not None:
            threading.Thread(
                target=self._watch, args=(self._over,), name="tfdml-preemption", daemon=True
            ).start()

    def stop(self) -> None:
        """Stops listening."""
        self._over.set()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_signal(self, number, frame) -> None:
        # A second signal changes nothing: the save that the first one requested continues.
        self._asked.set()

    def _watch(self, over: threading.Event) -> None:
        while not self._watcher():
            if over.wait(SECONDS):
                return
        self._asked.set()


class _CloudWatcher:
    """Watcher function that asks a cloud's metadata server, and says what it learns."""

    def __init__(self, cloud: str):
        self._cloud = cloud
        self._has_warned = False

    def __call__(self) -> bool:
        rank = started_together().rank
        try:
            notice = preemption_notice(self._cloud)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                say(
                    f"WARNING: no preemption notices on rank {rank}: the metadata server of "
                    f"on_preemption={self._cloud!r} at {ADDRESSES[self._cloud]} does not answer as "
                    f"documented: {error}. Training continues, SIGTERM counts, and the server is "
                    f"asked again every {SECONDS:.0f} s. On another cloud's machine change "
                    f"`on_preemption`."
                )
            return False
        if notice is not None:
            say(
                f"preemption notice on rank {rank}, of {self._cloud!r}: {notice}. All ranks save "
                f"after the same step and exit with code {PREEMPTED_EXIT_CODE}."
            )
        return notice is not None
