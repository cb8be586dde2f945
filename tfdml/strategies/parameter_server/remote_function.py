"""What Keras calls for a step, under parameter servers: a function that hands tasks to workers."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.parameter_server.extended import Task
from tfdml.strategies.parameter_server.logs import Logs
from tfdml.strategies.parameter_server.window import Window

# Tasks ahead of their turn for each worker, so that none waits for the chief.
_AHEAD = 2


class RemoteFunction:
    """Keras's train, test or predict function.

    Args:
        model: The model.
        strategy: The strategy.
        step: What a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: Any):
        self._model = model
        self._strategy = strategy
        self._step = step
        self._window = Window(strategy.coordinator)
        self._most = _AHEAD * strategy.size

    def join(self) -> None:
        """Waits until all tasks are done."""
        self._window.wait_until(lambda: self._window.size == 0)

    def cancel(self) -> None:
        """Gives up what is scheduled."""
        self._window.cancel()


class LoggingFunction(RemoteFunction):
    """One whose tasks return what they add to the metrics.

    Attributes:
        workers_seen: The workers that have taken a step.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: Any):
        super().__init__(model, strategy, step)
        self._ended: list[Task] = []
        self._logs = Logs(model, step, self._results)
        self.workers_seen: set[int] = set()

    def _begin_on(self, batch: Any) -> None:
        """Begins a step on a batch that the chief sends."""
        self._window.begin(self._step.on_batch(batch), (batch, self._strategy.streams))

    def _collect(self) -> dict[str, float]:
        """Notes which tasks are done; returns the logs of a moment ago."""
        for task in self._window.take_done():
            self._ended.append(task)
            self.workers_seen.add(task.worker)
        return self._logs.recent()

    def _results(self) -> list[np.ndarray]:
        """Returns what tasks have returned since the last call."""
        ended, self._ended = self._ended, []
        return self._results_of(ended)

    def _results_of(self, tasks: list[Task]) -> list[np.ndarray]:
        return [task.value.numpy() for task in tasks]

    def join(self) -> dict[str, float]:
        """Waits until all tasks are done; returns their logs, which the metrics then have."""
        super().join()
        self._collect()
        logs = self._logs.result()
        self._logs.expire()
        return logs

    def cancel(self) -> None:
        """Gives up all tasks, and what they have returned."""
        super().cancel()
        self._ended.clear()


def functions_of(model: keras.Model) -> Iterator[RemoteFunction]:
    """Yields what a model has made for Keras to call: for training, evaluation, prediction."""
    for function in (model.train_function, model.test_function, model.predict_function):
        if isinstance(function, RemoteFunction):
            yield function
