"""Asynchronous training: each worker takes steps of its own on the variables as it finds them."""

import keras
import tensorflow as tf

from tfdml.strategies.parameter_server.remote_function import LoggingFunction
from tfdml.strategies.parameter_server.shipping import RemoteIterators
from tfdml.strategies.parameter_server.worker_step import WorkerStep


class AsynchronousTraining(LoggingFunction):
    """Keras's train function: it schedules a step, and returns the logs of those done.

    Args:
        model: The model.
        strategy: The strategy.
        step: What a worker runs.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: WorkerStep):
        super().__init__(model, strategy, step)
        self._function = None
        self._seen = False

    def __call__(self, iterators: RemoteIterators) -> dict[str, float]:
        """Schedules a step (`steps_per_execution` of them).

        Returns:
            The logs of the steps that are done, on all workers.
        """
        if not isinstance(iterators, RemoteIterators):  # `train_on_batch`.
            self._begin_on(next(iterators))
            self.join()
            return self._logs.result()
        if self._function is None:
            self._function = self._step.on_iterator(iterators.values)
            self._logs.own_names = self._step.own_names
        self._wait_for_turn()
        self._window.begin(self._function, (iterators.values, self._strategy.streams))
        if not self._seen:
            # Keras wants a step's logs from the first one on.
            self.join()
            self._seen = True
        return self._collect()

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

    def cancel(self) -> None:
        """Gives up what is scheduled."""
        super().cancel()
        self._seen = False
