"""Batches that the chief reads and sends: each to one worker, and again if that dies.

So each sample is counted once in `evaluate`, and `predict` returns all rows in their order,
whatever the data are and whoever dies.
"""

import collections
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.parameter_server.logs import Logs
from tfdml.strategies.parameter_server.window import Window
from tfdml.strategies.parameter_server.worker_step import WorkerStep

_AHEAD = 2


class ScatteredEvaluation:
    """What Keras calls a test function.

    Args:
        model: The model.
        strategy: The strategy.
        step: What a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: WorkerStep):
        self._strategy = strategy
        self._step = step
        self._window = Window(strategy.coordinator)
        self._logs = Logs(model)
        self._steps = model.steps_per_execution

    def __call__(self, batches: Iterator) -> dict:
        """Sends a batch, or `steps_per_execution` of them.

        Returns:
            The logs of the batches that are done.

        Raises:
            StopIteration: At the end of the data, when all batches are done.
        """
        for number in range(self._steps):
            try:
                batch = next(batches)
            except StopIteration:
                if number:
                    break
                self.join()
                raise
            self._window.wait_until(lambda: self._window.size < _AHEAD * self._strategy.size)
            self._window.begin(self._step.on_batch(batch), (batch, self._strategy.streams))
            self._logs.own_names = self._step.own_names
        if isinstance(batches, Generator):  # `test_on_batch`: nothing comes after it.
            self.join()
        return self._collect()

    def _collect(self) -> dict:
        for task in self._window.take_done():
            self._logs.add(task.value)
        return self._logs.result()

    def join(self) -> None:
        """Waits until all batches are done; the metrics are then those of all of them."""
        self._window.wait_until(lambda: self._window.size == 0)
        self._collect()

    def cancel(self) -> None:
        """Gives up what is scheduled."""
        self._window.cancel()


class ScatteredPrediction:
    """What Keras calls a predict function, and what sends batches to the workers ahead of it.

    Args:
        model: The model.
        strategy: The strategy.
        step: What a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: WorkerStep):
        self._strategy = strategy
        self._step = step
        self._window = Window(strategy.coordinator)

    def ahead(self, batches: Iterable) -> Iterator:
        """Yields a task for each batch, in order; some are begun ahead of their turn."""
        running: collections.deque = collections.deque()
        for batch in batches:
            running.append(self._begin(batch))
            if len(running) > _AHEAD * self._strategy.size:
                yield running.popleft()
        yield from running

    def _begin(self, batch: Any) -> Any:
        self._window.take_done()  # They are known to who waits for them.
        return self._window.begin(self._step.on_batch(batch), (batch, self._strategy.streams))

    def __call__(self, data: list) -> Any:
        """Returns the outputs for tasks, or for batches; all rows, in order."""
        outputs = []
        for item in data:
            task = item if hasattr(item, "is_done") else self._begin(item)
            self._window.wait_until(lambda task=task: task.is_done)
            outputs.append(task.value)
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def join(self) -> None:
        """Does nothing: outputs are there when they are returned."""

    def cancel(self) -> None:
        """Gives up what is scheduled."""
        self._window.cancel()
