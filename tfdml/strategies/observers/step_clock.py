"""Clock inside the train step for computing, exchanging, and waiting for other ranks."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.unmanaged_variable import unmanaged_variable


class StepClock:
    """Observer that sums, on every rank, the seconds that its steps compute, exchange and wait.

    The exchange of gradients ends on all ranks at the same time, so the rank that spends the least
    time in it arrived last, the straggler. That time is the exchange's own; the time that other
    ranks spend beyond it is waiting for the straggler. So clocks of different ranks are never
    compared. The ranks share their times in the message that carries the metrics. The first step
    of a `fit` is not counted, because ranks take different times to trace and compile it.

    Args:
        collective: Collective that gives the rank and the number of ranks.
    """

    def __init__(self, collective: Collective):
        self.collective = collective
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._began, self._ready, self._done = zeros(), zeros(), zeros()
            self._sums = zeros(5)  # Steps; seconds of step, compute, exchange, wait.
            self._caused = zeros(collective.size)
            self._last = zeros()
            self._counts = zeros()  # 1 if the step is counted, else 0.

    def skip(self) -> None:
        """Excludes the next step from the sums."""
        self._counts.assign(0.0)

    def reset(self) -> None:
        """Clears the sums."""
        for variable in (self._sums, self._caused, self._last):
            variable.assign(tf.zeros_like(variable))

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch has arrived."""
        now = tf.timestamp()
        first = self._last.read_value() == 0
        elapsed = tf.where(first, tf.zeros_like(now), now - self._last.read_value())
        self._sums.assign_add(tf.stack([0.0, elapsed, 0.0, 0.0, 0.0]))
        self._last.assign(now)
        for variable in (self._began, self._ready, self._done):
            variable.assign(now)

    def note_gradients(self, local: Sequence) -> None:
        """Notes the time at which all of this rank's gradients are computed."""
        with tf.control_dependencies(_tensors(local)):
            self._ready.assign(tf.timestamp())

    def note_sums(self, sums: Sequence) -> None:
        """Notes the time at which the exchange has ended."""
        with tf.control_dependencies(_tensors(sums)):
            self._done.assign(tf.timestamp())

    def slots(self) -> tf.Tensor:
        """Returns this rank's seconds in the exchange at its index, else 0: float32, `[size]`."""
        spent = tf.cast(self._done.read_value() - self._ready.read_value(), tf.float32)
        return tf.one_hot(self.collective.rank, self.collective.size) * spent

    def add(self, spent: tf.Tensor) -> None:
        """Adds a step to the sums.

        Args:
            spent: Seconds that each rank spent in the exchange: float32, shape `[size]`.
        """
        spent = tf.cast(spent, tf.float64)
        exchange = tf.reduce_min(spent)
        compute = self._ready.read_value() - self._began.read_value()
        wait = spent[self.collective.rank] - exchange
        counts = self._counts.read_value()
        self._sums.assign_add(counts * tf.stack([1.0, 0.0, compute, exchange, wait]))
        last = tf.one_hot(tf.argmin(spent), self.collective.size, dtype=tf.float64)
        self._caused.assign_add(counts * last * tf.reduce_sum(spent - exchange))
        self._last.assign(counts * self._last.read_value())
        self._counts.assign(1.0)

    def read(self) -> tuple[list[float], np.ndarray]:
        """Returns the mean seconds per step, and the waiting that each rank caused.

        Returns:
            The mean seconds of step, compute, exchange and wait; and the total seconds that all
            ranks together waited for each rank: float64, shape `[size]`.
        """
        steps, step, *others = self._sums.numpy().tolist()
        count = max(steps, 1.0)
        # A step lasts until the next one begins, so there is one duration fewer than steps.
        return [step / max(count - 1, 1.0), *(s / count for s in others)], self._caused.numpy()


def _tensors(structure: Sequence) -> list[tf.Tensor]:
    return tf.nest.flatten(structure, expand_composites=True)
