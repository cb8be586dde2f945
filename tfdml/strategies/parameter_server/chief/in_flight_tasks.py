"""Tasks in flight: their number, order and results."""

import collections
import contextlib
import threading
from collections.abc import Callable

import tensorflow as tf

from tfdml.strategies.parameter_server.extended import Shares, WorkerTask


class InFlightTasks:
    """The tasks that are not done yet.

    Args:
        coordinator: TensorFlow's coordinator.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator):
        self._coordinator = coordinator
        self._changed = threading.Condition()
        # In the order in which they began.
        self._running: dict[int, WorkerTask] = {}
        self._done: collections.deque[WorkerTask] = collections.deque()
        self._begun = 0
        self._error: Exception | None = None

    def begin(self, function: Callable, args: tuple, shares: Shares | None = None) -> WorkerTask:
        """Schedules a task; see `WorkerTask`."""
        with self._changed:
            number = self._begun
            self._begun += 1
        ended = lambda task: self._on_end(number, task)  # noqa: E731
        task = WorkerTask(function, self._coordinator, args, ended, shares)
        with self._changed:
            self._running[number] = task
        return task.schedule()

    def _on_end(self, number: int, task: WorkerTask) -> None:
        with self._changed:
            if self._running.pop(number, None) is not None:
                if task.error is None:
                    self._done.append(task)
                else:
                    self._error = self._error or task.error
            self._changed.notify_all()

    @property
    def size(self) -> int:
        """The number of tasks that are not done."""
        return len(self._running)

    @property
    def spread(self) -> int:
        """The number of tasks begun since the oldest unfinished one, including it."""
        with self._changed:
            oldest = next(iter(self._running), self._begun)
            return self._begun - oldest

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds; checks it whenever a task ends.

        Raises:
            Exception: The error that ended a task.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or condition())
            error, self._error = self._error, None
        if error is not None:
            raise error

    def take_done(self) -> list[WorkerTask]:
        """Returns the tasks that have ended since the last call."""
        with self._changed:
            done, self._done = list(self._done), collections.deque()
            return done

    def forget(self) -> None:
        """Drops all tasks: running tasks continue unobserved, scheduled ones are cancelled."""
        with self._changed:
            for task in self._running.values():
                task.cancelled = True
            self._running.clear()
            self._done.clear()

    def cancel(self) -> None:
        """Cancels all tasks and waits for those that run."""
        self.forget()
        # Otherwise TensorFlow would raise an earlier error when the next task is scheduled.
        with contextlib.suppress(Exception):
            self._coordinator.join()
        self._error = None
