"""Synchronous training: all workers compute gradients of one global batch, then one update is made.

The chief reads a batch and sends each worker its share of the rows. If a worker dies, or another
one is done before it has begun, its share goes to that one. Nothing changes before all results have
arrived, so a step is atomic.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdml.aggregation import CoordinateRule
from tfdml.strategies.input.local_batch import BatchSplitter, as_tensors
from tfdml.strategies.parameter_server.chief.remote_function import LoggingFunction
from tfdml.strategies.parameter_server.extended import CHIEF_DEVICE, Shares
from tfdml.strategies.parameter_server.step.share_step import ShareStep


class SynchronousTraining(LoggingFunction):
    """Train function that takes a step with all workers and returns when it is done.

    Args:
        model: The model.
        strategy: The strategy.
        step: The step that a worker runs on its share.

    Attributes:
        worker_of_share: The worker that computed each share of the last step, by its number.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, step: ShareStep):
        super().__init__(model, strategy, step)
        self._steps = model.steps_per_execution
        self._needed = strategy.size - strategy.backup_workers
        self._updates: dict[Callable, Callable] = {}  # By the function whose results they get.
        self.worker_of_share: dict[int, int] = {}
        self._seconds: list[float] = []  # Of the shares of the last tasks.

    @property
    def workers(self) -> set[int]:
        """Indices of the workers that took part in the last step."""
        return set(self.worker_of_share.values())

    def __call__(self, batches: Iterator) -> dict:
        """Takes `steps_per_execution` steps.

        Returns:
            The logs after the last step.

        Raises:
            StopIteration: At the end of the data.
        """
        for number in range(self._steps):
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                if number:
                    break
                raise
            self._take(batch, time.perf_counter() - began)
        return self._logs.result()

    def _take(self, batch: Any, data_wait: float) -> None:
        workers = self._strategy.size
        splitter = BatchSplitter(0, workers, workers, self._strategy.batch_split.weights)
        with tf.device(CHIEF_DEVICE):
            # `train_on_batch` takes arrays.
            local_batch = splitter.split(as_tensors(batch))
            shares = [
                (part, local_batch.rows[i], local_batch.global_rows)
                for i, part in enumerate(local_batch.parts)
            ]
            streams = [tf.constant(i, tf.int64) for i in range(len(shares))]
        totals = tf.zeros([0], tf.float64)
        counts = self._step.counts(*shares[0], streams[0])
        if counts is not None:
            arguments = [(*s, stream) for s, stream in zip(shares, streams, strict=True)]
            totals = tf.add_n(self._run(counts, arguments, len(shares)))
        function = self._step.on_share(*shares[0], streams[0], totals)
        arguments = [(*s, stream, totals) for s, stream in zip(shares, streams, strict=True)]
        results = self._run(function, arguments, self._needed)
        rows = local_batch.rows.numpy().tolist()
        taken = list(self.worker_of_share.values())
        of_taken = [rows[share] for share in self.worker_of_share]
        if self._needed == workers:
            self._strategy.share_clock.add(taken, rows, self._seconds)
        vectors, gradients = map(list, zip(*results, strict=True))
        with self._strategy.scope():
            update = self._update_for(function, len(results))
            weights = tf.constant(of_taken, tf.float64) / tf.cast(
                local_batch.global_rows, tf.float64
            )
            self._logs.add(update(vectors, gradients, weights).numpy())
        self._strategy.worker_clock.add_step(taken, of_taken, self._seconds, data_wait)

    def _update_for(self, function: Callable, shares: int) -> Callable:
        """Returns the update for results of a function, for any number of a table's rows."""
        if function not in self._updates:
            vector, gradients = tf.nest.map_structure(
                lambda t: tf.TensorSpec(t.shape, t.dtype), function.structured_outputs
            )
            self._updates[function] = tf.function(self._apply).get_concrete_function(
                [vector] * shares, [gradients] * shares, tf.TensorSpec([shares], tf.float64)
            )
        return self._updates[function]

    def _run(self, function: Callable, arguments: list[tuple], needed: int) -> list:
        """Runs a task per share; returns the first `needed` results, in the order of the shares."""
        shares = Shares(arguments)
        tasks = [self._in_flight.begin(function, own, shares) for own in arguments]
        done = lambda: [t for t in tasks if t.value is not None]  # noqa: E731
        self._in_flight.wait_until(lambda: len(done()) >= needed)
        first = sorted(done()[:needed], key=lambda task: task.share)
        self._seconds = [task.seconds for task in first]
        self._in_flight.forget()
        self.worker_of_share = {task.share: task.worker for task in first}
        return [task.value for task in first]

    def _apply(self, vectors: list, gradients: list, weights: tf.Tensor) -> tf.Tensor:
        """Applies the sum of all shares' gradients; returns the metrics and own results, summed."""
        rule = self._strategy.gradient_aggregation
        add = _sum if rule is None else functools.partial(_combined, rule, weights)
        with tf.device(CHIEF_DEVICE):
            whole = [self._step.decode(g) for g in gradients]
            sums = [add(parts) for parts in zip(*whole, strict=True)]
            vector = tf.add_n(vectors)
            rest = self._step.assign_state(vector, vectors[0])
        optimizer, variables = self._model.optimizer, self._model.trainable_variables
        present = iter(sums)
        summed = [next(present) if has else None for has in self._step.has_gradient]
        self._strategy.run(lambda: optimizer.apply(summed, variables))
        return rest


def _sum(parts: tuple) -> Any:
    if isinstance(parts[0], tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([p.values for p in parts], 0),
            tf.concat([p.indices for p in parts], 0),
            parts[0].dense_shape,
        )
    return tf.add_n(list(parts))


def _combined(rule: CoordinateRule, weights: tf.Tensor, parts: tuple) -> tf.Tensor:
    """Returns a gradient combined from the shares' by a rule, dense.

    Args:
        rule: The rule.
        weights: The shares' parts of the batch's rows: float64, `[shares]`.
        parts: The shares' gradients, times their weights.
    """
    rows = tf.stack([tf.reshape(tf.convert_to_tensor(part), [-1]) for part in parts])
    weights = tf.cast(weights, rows.dtype)
    means = rows / tf.where(weights > 0, weights, 1)[:, tf.newaxis]
    return tf.reshape(rule.combine(means, weights).values, parts[0].shape)
