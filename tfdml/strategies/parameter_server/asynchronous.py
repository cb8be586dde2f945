"""Asynchronous training: each worker takes steps of its own on the variables as it finds them."""

from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.parameter_server.logs import Logs
from tfdml.strategies.parameter_server.shipping import RemoteIterators
from tfdml.strategies.parameter_server.window import Window
from tfdml.strategies.parameter_server.worker_step import WorkerStep

# Steps scheduled ahead for each worker, so that none waits for the chief.
_AHEAD = 2


class AsynchronousTraining:
    """What Keras calls a train function: it schedules a step, and returns the logs of those done.

    Args:
        model: The model.
        strategy: The strategy.
        step: What a worker runs.

    Attributes:
        workers_seen: The workers that have taken a step.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: WorkerStep):
        self._model = model
        self._strategy = strategy
        self._step = step
        self._window = Window(strategy.coordinator)
        self._logs = Logs(model)
        self._most = _AHEAD * strategy.size
        self._function = None
        self._seen = False
        self.workers_seen: set[int] = set()

    def __call__(self, iterators: RemoteIterators) -> dict:
        """Schedules a step (`steps_per_execution` of them).

        Returns:
            The logs of the steps that are done, on all workers.
        """
        if not isinstance(iterators, RemoteIterators):
            return self._on_batch(next(iterators))
        if self._function is None:
            self._function = self._step.on_iterator(iterators.values)
            self._logs.own_names = self._step.own_names
        self._wait_for_turn()
        self._window.begin(self._function, (iterators.values, self._strategy.streams))
        if not self._seen:
            self._window.wait_until(lambda: self._window.size == 0)
            self._seen = True
        return self._collect()

    def _on_batch(self, batch: Any) -> dict:
        """Takes one step on a batch of the chief's, as `train_on_batch` asks for."""
        self._window.begin(self._step.on_batch(batch), (batch, self._strategy.streams))
        self._logs.own_names = self._step.own_names
        self.join()
        return self._logs.result()

    def _wait_for_turn(self) -> None:
        """Waits for a worker to be free, and for what has been running for too long."""
        bound = self._strategy.max_staleness
        # Of the steps that a step runs beside, as many may have begun before it as after it.
        spread = self._most if bound is None else bound // 2
        self._window.wait_until(
            lambda: (
                self._window.size < self._most and (bound is None or self._window.spread <= spread)
            )
        )

    def _collect(self) -> dict:
        for task in self._window.take_done():
            self._logs.add(task.value)
            self.workers_seen.add(task.worker)
        return self._logs.result()

    def join(self) -> None:
        """Waits until all steps are done; the metrics are then those of all of them."""
        self._window.wait_until(lambda: self._window.size == 0)
        self._collect()

    def cancel(self) -> None:
        """Gives up what is scheduled."""
        self._window.cancel()
        self._seen = False
