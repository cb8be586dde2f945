"""A clock inside the train step: computing, exchanging, and waiting for other ranks."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.own_variable import own_variable


class StepClock:
    """Adds up, on every rank, what its steps spend on what.

    The exchange of gradients ends on all ranks together, so whoever spends the least time in it has
    come last: that time is the exchange's own, and what others spend beyond it is waiting for that
    rank. So no two ranks' clocks are compared. The ranks tell each other their times with the
    metrics, in the message that is sent anyway. A fit's first step is not counted: each rank traces
    and compiles it in a time of its own.

    Args:
        collective: Who the ranks are.
    """

    def __init__(self, collective: Collective):
        self.collective = collective
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: own_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._began, self._ready, self._done = zeros(), zeros(), zeros()
            self._sums = zeros(5)  # Steps; seconds of step, compute, exchange, wait.
            self._caused = zeros(collective.size)
            self._last = zeros()
            self._counts = zeros()  # 1 if the step is counted, else 0.

    def skip(self) -> None:
        """Leaves the next step out."""
        self._counts.assign(0.0)

    def reset(self) -> None:
        """Starts anew."""
        for variable in (self._sums, self._caused, self._last):
            variable.assign(tf.zeros_like(variable))

    def begin(self) -> None:
        """A step begins; called in its graph once the batch is there."""
        now = tf.timestamp()
        first = self._last.read_value() == 0
        elapsed = tf.where(first, tf.zeros_like(now), now - self._last.read_value())
        self._sums.assign_add(tf.stack([0.0, elapsed, 0.0, 0.0, 0.0]))
        self._last.assign(now)
        for variable in (self._began, self._ready, self._done):
            variable.assign(now)

    def note_gradients(self, local: Sequence) -> None:
        """Notes when all of this rank's gradients are there."""
        with tf.control_dependencies(_tensors(local)):
            self._ready.assign(tf.timestamp())

    def note_sums(self, sums: Sequence) -> None:
        """Notes when the exchange has ended."""
        with tf.control_dependencies(_tensors(sums)):
            self._done.assign(tf.timestamp())

    def slots(self) -> tf.Tensor:
        """Returns this rank's seconds in the exchange, in its own place: float32, `[size]`."""
        spent = tf.cast(self._done.read_value() - self._ready.read_value(), tf.float32)
        return tf.one_hot(self.collective.rank, self.collective.size) * spent

    def add(self, spent: tf.Tensor) -> None:
        """Adds a step up.

        Args:
            spent: Every rank's seconds in the exchange: float32, shape `[size]`.
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
        """Returns the mean seconds of step, compute, exchange and wait; and who caused waiting.

        The second is the seconds that all ranks together have waited for each one: `[size]`.
        """
        steps, step, *others = self._sums.numpy().tolist()
        count = max(steps, 1.0)
        # A step lasts until the next one begins, so there is one time less.
        return [step / max(count - 1, 1.0), *(s / count for s in others)], self._caused.numpy()


def _tensors(structure: Sequence) -> list[tf.Tensor]:
    return tf.nest.flatten(structure, expand_composites=True)
