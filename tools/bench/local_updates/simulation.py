"""Training with local updates: one process and one model play all workers in turn."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Method:
    """Describes when workers synchronize, and what becomes of their weights.

    Attributes:
        sync_every: Number of local steps between two synchronizations.
        outer: Makes the optimizer that applies the mean pseudo-gradient to the weights of the last
            synchronization; None to take the mean of the workers' weights.
        synchronous: Fraction of the training, from its beginning, with synchronous steps.
    """

    sync_every: int = 1
    outer: Callable[[], keras.Optimizer] | None = None
    synchronous: float = 0.0


def synchronous_steps(method: Method, epochs: int, steps: int) -> int:
    """Returns the number of synchronous steps at the beginning of a training."""
    return round(method.synchronous * epochs * steps)


def local_rounds(method: Method, epochs: int, steps: int) -> Iterator[slice]:
    """Yields the steps between two synchronizations, after the synchronous steps.

    An epoch ends with a synchronization, and the count starts again.

    Args:
        method: The method of training.
        epochs: Number of epochs.
        steps: Number of steps of an epoch.
    """
    synchronous = synchronous_steps(method, epochs, steps)
    for epoch in range(epochs):
        end = (epoch + 1) * steps
        for first in range(max(epoch * steps, synchronous), end, method.sync_every):
            yield slice(first, min(first + method.sync_every, end))


def exchanges(method: Method, epochs: int, steps: int) -> int:
    """Returns how often workers exchange gradients or weights in a training."""
    rounds = sum(1 for _ in local_rounds(method, epochs, steps))
    return synchronous_steps(method, epochs, steps) + rounds


def shuffled(rows: int, batch: int, epochs: int, seed: int) -> list[np.ndarray]:
    """Returns the rows of each global batch: every row once an epoch, each epoch in a new order.

    Args:
        rows: Number of rows of the data.
        batch: Rows of a global batch; the last one of an epoch may have fewer.
        epochs: Number of epochs.
        seed: Seed of the orders.
    """
    random = np.random.default_rng(seed)
    orders = [random.permutation(rows) for _ in range(epochs)]
    return [order[i : i + batch] for order in orders for i in range(0, rows, batch)]


class Simulation:
    """A model, and the weights and optimizer slots of each worker, which it gets in turn.

    Args:
        model: A built model. All its variables are trained.
        inner: Optimizer of the local steps; each worker has slots of its own.
        loss: Mean loss of a batch.
        workers: Number of workers.

    Raises:
        ValueError: If the model has variables that are not trained.
    """

    def __init__(
        self, model: keras.Model, inner: keras.Optimizer, loss: keras.Loss, workers: int
    ) -> None:
        if model.non_trainable_variables:
            raise ValueError(
                "`model` must have no variables that are not trained: synchronizations do not mean "
                f"them. Received: {[v.path for v in model.non_trainable_variables]}."
            )
        self._model, self._inner, self._loss = model, inner, loss
        self._workers = workers
        self._weights = model.trainable_variables
        inner.build(self._weights)
        self._slots = inner.variables
        self._step = tf.function(self._step, reduce_retracing=True)
        self._read = tf.function(lambda: [tf.identity(v.value) for v in self._weights])
        self._read_slots = tf.function(lambda: [tf.identity(v.value) for v in self._slots])

    def train(
        self, x: np.ndarray, y: np.ndarray, batches: list[np.ndarray], epochs: int, method: Method
    ) -> None:
        """Trains the model; afterwards it has the weights of the last synchronization.

        Args:
            x: Data of shape (rows, ...).
            y: Labels of shape (rows, ...).
            batches: Rows of each global batch, of all epochs; parts of workers differ by one row at
                most.
            epochs: Number of epochs, all of the same number of batches.
            method: The method of training.

        Raises:
            ValueError: If a global batch has fewer rows than there are workers.
        """
        if (fewest := min(len(rows) for rows in batches)) < self._workers:
            raise ValueError(
                f"`batches` must have a row for each of {self._workers} workers. Received: a batch "
                f"of {fewest} rows."
            )
        steps = len(batches) // epochs
        for rows in batches[: synchronous_steps(method, epochs, steps)]:
            self._step(x[rows], y[rows])
        outer = method.outer() if method.outer else None
        slots = [self._read_slots()] * self._workers
        for local in local_rounds(method, epochs, steps):
            start, ends, shares = self._read(), [], []
            for worker in range(self._workers):
                _assign(self._weights, start)
                _assign(self._slots, slots[worker])
                parts = [np.array_split(rows, self._workers)[worker] for rows in batches[local]]
                for part in parts:
                    self._step(x[part], y[part])
                shares.append(sum(map(len, parts)) / sum(map(len, batches[local])))
                ends.append(self._read())
                slots[worker] = self._read_slots()
            self._synchronize(start, ends, shares, outer)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
        self._inner.apply(tape.gradient(loss, self._weights), self._weights)

    def _synchronize(
        self,
        start: Sequence[tf.Tensor],
        ends: Sequence[Sequence[tf.Tensor]],
        shares: Sequence[float],
        outer: keras.Optimizer | None,
    ) -> None:
        """Gives the model the common weights that follow from those of all workers.

        Args:
            start: Common weights before the local steps.
            ends: Weights of each worker after them.
            shares: Part of the rows that each worker has trained on.
            outer: Optimizer that applies the pseudo-gradient; None to take the mean.
        """
        means = [
            tf.add_n([share * end for share, end in zip(shares, same, strict=True)])
            for same in zip(*ends, strict=True)
        ]
        if outer is None:
            _assign(self._weights, means)
        else:
            _assign(self._weights, start)
            outer.apply([a - b for a, b in zip(start, means, strict=True)], self._weights)


def _assign(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
