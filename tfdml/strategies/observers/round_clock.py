"""Clock for rounds of local steps and their synchronizations, by which intervals are chosen."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.unmanaged_variable import unmanaged_variable


class RoundClock:
    """Observer of synchronizations that tells all ranks the same times, and rank 0's learning rate.

    A rank's time in an exchange contains its waiting for the others; the rank that arrives last
    waits least, and its time is the exchange's own. The first synchronization, before which ranks
    trace their steps, is not measured.

    Args:
        collective: Collective that gives the rank and the number of ranks.
    """

    def __init__(self, collective: Collective):
        self._rank, self._size = collective.rank, collective.size
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._began, self._ready, self._done = zeros(), zeros(), zeros()
            self._steps, self._rate, self._rounds = zeros(), zeros(), zeros()
            # Of the last synchronization: the learning rate; then each rank's seconds of a local
            # step; then each rank's seconds of the exchange.
            self._totals = unmanaged_variable(tf.zeros([1 + 2 * self._size]))

    def note_round(self, steps: int, learning_rate: float) -> None:
        """Notes, before a synchronization, how many steps precede it, and the learning rate."""
        self._steps.assign(float(steps))
        self._rate.assign(learning_rate)

    def note_weights(self, weights: tf.Tensor) -> None:
        """Notes the time at which this rank's weights are those of its last local step."""
        with tf.control_dependencies([tf.identity(weights)]):
            self._ready.assign(tf.timestamp())

    def note_sums(self, sums: Sequence[tf.Tensor]) -> None:
        """Notes the time at which the exchange has ended."""
        with tf.control_dependencies([tf.identity(total) for total in sums]):
            self._done.assign(tf.timestamp())

    def begin(self) -> None:
        """Notes that a round begins."""
        self._began.assign(tf.timestamp())

    def slots(self) -> tf.Tensor:
        """Returns rank 0's learning rate, and this rank's times: float32, `[1 + 2 * size]`."""
        own = tf.one_hot(self._rank, self._size, dtype=tf.float64)
        began, ready = self._began.read_value(), self._ready.read_value()
        is_timed = tf.cast(self._rounds.read_value() > 0, tf.float64)
        step = is_timed * (ready - began) / tf.maximum(self._steps.read_value(), 1.0)
        exchange = is_timed * (self._done.read_value() - ready)
        rate = self._rate.read_value() * (1.0 if self._rank == 0 else 0.0)
        return tf.cast(tf.concat([[rate], own * step, own * exchange], 0), tf.float32)

    def add(self, total: tf.Tensor) -> None:
        """Records the sums over ranks: float32, shape `[1 + 2 * size]`."""
        self._totals.assign(total)
        self._rounds.assign_add(1.0)

    def read(self) -> tuple[float, float, float]:
        """Returns the learning rate, the slowest rank's seconds of a step, and the exchange's.

        Seconds are 0 if they were not measured. All ranks get the same numbers.
        """
        totals = self._totals.numpy().tolist()
        steps, exchanges = totals[1 : 1 + self._size], totals[1 + self._size :]
        return totals[0], max(steps), min(exchanges)
