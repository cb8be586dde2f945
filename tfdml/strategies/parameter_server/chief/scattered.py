"""Evaluation and prediction on batches that the chief reads and sends, each to one worker.

If a worker dies, its batch is sent to another one. So `evaluate` counts each sample once, and
`predict` returns all rows in order, for any data and whichever worker dies.
"""

import collections
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.parameter_server.chief.remote_function import LoggingFunction, RemoteFunction
from tfdml.strategies.parameter_server.step.worker_step import WorkerStep


class ScatteredEvaluation(LoggingFunction):
    """Test function that sends each batch to one worker.

    Args:
        model: The model.
        strategy: The strategy.
        step: The step that a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: WorkerStep):
        super().__init__(model, strategy, step)
        self._steps = model.steps_per_execution

    def __call__(self, batches: Iterator) -> dict[str, float]:
        """Sends `steps_per_execution` batches.

        Returns:
            The logs of the finished batches.

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
            self._in_flight.wait_until(lambda: self._in_flight.size < self._max_in_flight)
            self._begin_on(batch)
        if isinstance(batches, Generator):  # `test_on_batch`: nothing comes after it.
            return self.join()
        return self._collect()


class ScatteredPrediction(RemoteFunction):
    """Predict function, with an iterator that sends batches to the workers ahead of it."""

    def ahead(self, batches: Iterable) -> Iterator:
        """Yields a task for each batch, in order; some are scheduled ahead of their turn."""
        running: collections.deque = collections.deque()
        for batch in batches:
            running.append(self._begin(batch))
            if len(running) > self._max_in_flight:
                yield running.popleft()
        yield from running

    def _begin(self, batch: Any) -> Any:
        self._in_flight.take_done()  # Discarded: the caller holds the tasks that it waits for.
        return self._in_flight.begin(self._step.on_batch(batch), (batch, self._strategy.streams))

    def __call__(self, data: list) -> Any:
        """Returns the outputs for tasks or batches: all rows, in order."""
        outputs = []
        for item in data:
            task = item if hasattr(item, "is_done") else self._begin(item)
            self._in_flight.wait_until(lambda task=task: task.is_done)
            outputs.append(task.value)
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
