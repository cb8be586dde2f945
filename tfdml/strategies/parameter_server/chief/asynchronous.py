"""Asynchronous training: each worker takes its own steps on the current values of the variables."""

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.parameter_server.chief.remote_function import LoggingFunction
from tfdml.strategies.parameter_server.extended import WorkerTask
from tfdml.strategies.parameter_server.remote_datasets import RemoteIterators
from tfdml.strategies.parameter_server.result_table import ResultTable
from tfdml.strategies.parameter_server.step.worker_step import WorkerStep

# Rows of the result table per task that may be in flight; the chief reads many rows at once.
_ROWS = 16


class AsynchronousTraining(LoggingFunction):
    """Train function that schedules a step, and returns the logs of the finished steps.

    Args:
        model: The model.
        strategy: The strategy.
        step: The step that a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: WorkerStep):
        super().__init__(model, strategy, step)
        self._table = ResultTable(strategy.coordinator, _ROWS * self._max_in_flight)
        self._rows: dict[WorkerTask, int] = {}
        self._function = None
        self._seen = False

    def __call__(self, iterators: RemoteIterators) -> dict[str, float]:
        """Schedules `steps_per_execution` steps as one task.

        Returns:
            Recent logs of the steps finished on all workers.
        """
        if not isinstance(iterators, RemoteIterators):  # `train_on_batch`.
            self._begin_on(next(iterators))
            return self.join()
        if self._function is None:
            self._function = self._step.on_iterator(iterators.values, self._table)
        self._wait_for_turn()
        logs = self._collect()
        if self._table.is_full:
            logs = self._logs.result()
        row = self._table.take_row()
        arguments = (iterators.values, self._strategy.streams, self._table.on_workers(row))
        self._rows[self._in_flight.begin(self._function, arguments)] = row
        if not self._seen:
            # Keras needs logs from the first step.
            self._seen = True
            return self.join()
        return logs

    def _results_of(self, tasks: list[WorkerTask]) -> list[np.ndarray]:
        given = [task for task in tasks if task not in self._rows]
        read = [task for task in tasks if task in self._rows]
        rows = [self._rows.pop(task) for task in read]
        vectors = [*super()._results_of(given), *self._table.read(rows)]
        for task, vector in zip([*given, *read], vectors, strict=True):
            steps = 1 if task in given else self._model.steps_per_execution
            clock = self._strategy.worker_clock
            clock.add_task(task.worker, steps, float(vector[-1]), task.seconds)
        return vectors

    def _wait_for_turn(self) -> None:
        """Waits for a free worker, and for tasks whose staleness is at its bound."""
        bound = self._strategy.max_staleness
        # A step may overlap with as many steps that began before it as with ones that began after.
        spread = self._max_in_flight if bound is None else bound // 2
        self._in_flight.wait_until(
            lambda: (
                self._in_flight.size < self._max_in_flight
                and (bound is None or self._in_flight.spread <= spread)
            )
        )

    def cancel(self) -> None:
        """Cancels the scheduled tasks."""
        super().cancel()
        self._rows.clear()
        self._table.clear()
        self._seen = False
