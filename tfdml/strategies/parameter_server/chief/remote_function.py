"""Keras's step functions under parameter servers, which schedule tasks on workers."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.parameter_server.chief.in_flight_tasks import InFlightTasks
from tfdml.strategies.parameter_server.chief.metric_log import MetricLog
from tfdml.strategies.parameter_server.extended import WorkerTask

# Tasks scheduled ahead for each worker, so that no worker waits for the chief.
_AHEAD = 2


class RemoteFunction:
    """Base of Keras's train, test and predict functions.

    Args:
        model: The model.
        strategy: The strategy.
        step: The step that a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: Any):
        self._model = model
        self._strategy = strategy
        self._step = step
        self._in_flight = InFlightTasks(strategy.coordinator)
        self._max_in_flight = _AHEAD * strategy.size

    def join(self) -> None:
        """Waits until all tasks are done."""
        self._in_flight.wait_until(lambda: self._in_flight.size == 0)

    def cancel(self) -> None:
        """Cancels the scheduled tasks."""
        self._in_flight.cancel()


class LoggingFunction(RemoteFunction):
    """Remote function whose tasks return their contributions to the metrics.

    Attributes:
        workers_seen: Indices of the workers that have run a step.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: Any):
        super().__init__(model, strategy, step)
        self._ended: list[WorkerTask] = []
        self._logs = MetricLog(model, step, self._results)
        self.workers_seen: set[int] = set()

    def _begin_on(self, batch: Any) -> None:
        """Schedules a step on a batch that the chief sends."""
        self._in_flight.begin(self._step.on_batch(batch), (batch, self._strategy.streams))

    def _collect(self) -> dict[str, float]:
        """Records the finished tasks; returns recent logs."""
        for task in self._in_flight.take_done():
            self._ended.append(task)
            self.workers_seen.add(task.worker)
        return self._logs.recent()

    def _results(self) -> list[np.ndarray]:
        """Returns the results of tasks since the last call."""
        ended, self._ended = self._ended, []
        return self._results_of(ended)

    def _results_of(self, tasks: list[WorkerTask]) -> list[np.ndarray]:
        return [task.value.numpy() for task in tasks]

    def join(self) -> dict[str, float]:
        """Waits until all tasks are done; adds their results to the metrics, returns the logs."""
        super().join()
        self._collect()
        logs = self._logs.result()
        self._logs.expire()
        return logs

    def cancel(self) -> None:
        """Cancels all tasks and drops their results."""
        super().cancel()
        self._ended.clear()


def remote_functions(model: keras.Model) -> Iterator[RemoteFunction]:
    """Yields a model's remote functions for training, evaluation and prediction."""
    for function in (model.train_function, model.test_function, model.predict_function):
        if isinstance(function, RemoteFunction):
            yield function
