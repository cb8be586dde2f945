"""Clock inside the train step: computing, exchanging, and waiting for ranks and for data."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.unmanaged_variable import unmanaged_variable


@dataclasses.dataclass(frozen=True)
class StepSums:
    """Sums of one rank over some steps; times are in seconds, None if they cannot be known.

    Attributes:
        rounds: Number of exchanges: one a step, or with local updates one a round of steps.
        steps: Number of steps.
        rows: Rows of the batches on which this rank worked.
        step: Time of whole steps, from the end of one to the end of the next.
        compute: Time from a batch's arrival until all gradients of this rank are ready.
        exchange: Time of the exchanges after that, from the arrival of the last rank.
        wait: Time that this rank waited for other ranks before them.
        data_wait: Time from the end of a step until the next batch arrived on this rank.
        caused: Time that all ranks together waited for each rank: float64, shape `[size]`.
    """

    rounds: float
    steps: float
    rows: float
    step: float
    compute: float
    exchange: float | None
    wait: float | None
    data_wait: float | None
    caused: np.ndarray

    @property
    def numbers(self) -> list[float]:
        """The sums of this rank alone, in the order of the attributes."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)[:-1]]


_NUMBERS = len(dataclasses.fields(StepSums)) - 1


@dataclasses.dataclass(frozen=True)
class StepTotals:
    """Totals of one rank over all steps of its clock so far.

    Attributes:
        every: `StepSums.numbers` over all steps: float64.
        counted: The same without the first step of each `fit`.
        caused: Seconds that all ranks together waited for each rank: float64, shape `[size]`.
    """

    every: np.ndarray
    counted: np.ndarray
    caused: np.ndarray

    @property
    def steps(self) -> int:
        """The number of all steps."""
        return int(self.every[1])

    @property
    def sums(self) -> StepSums:
        """The sums over all steps."""
        return StepSums(*self.every.tolist(), caused=self.caused)

    def since(self, before: "StepTotals") -> StepSums:
        """Returns the sums over the steps since an earlier time.

        A first step of a `fit` is in them only if there is no other.

        Args:
            before: The totals at that time.
        """
        every, counted = self.every - before.every, self.counted - before.counted
        sums = counted if counted[0] else every
        return StepSums(*sums.tolist(), caused=self.caused - before.caused)


class StepClock:
    """Observer that sums, on every rank, the seconds that its steps compute, exchange and wait.

    The exchange of gradients ends on all ranks at the same time, so the rank that spends the least
    time in it arrived last, the straggler. That time is the exchange's own; the time that other
    ranks spend beyond it is waiting for the straggler. So clocks of different ranks are never
    compared. The ranks share their times in the message that carries the metrics. Totals only
    grow, so any number of readers take their differences. The first step of a `fit` is summed
    apart, because ranks take different times to trace and compile it.

    Args:
        collective: Collective that gives the rank and the number of ranks.
    """

    def __init__(self, collective: Collective):
        self.collective = collective
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._began, self._ready, self._done = zeros(), zeros(), zeros()
            self._batches = zeros(2)  # Steps and rows since `begin`.
            self._sums = zeros(2, _NUMBERS)  # Of all steps, and of those that are counted.
            self._caused = zeros(collective.size)
            # When the last step ended.
            self._last = unmanaged_variable(tf.timestamp())
            self._counts = zeros()  # 1 if the step is counted, else 0.

    def skip(self) -> None:
        """Excludes the next step from the counted ones."""
        self._counts.assign(0.0)

    def begin_epoch(self) -> None:
        """Starts the time of the next step now, because something else took place before."""
        self._last.assign(tf.timestamp())

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch has arrived."""
        now = tf.timestamp()
        for variable in (self._began, self._ready, self._done):
            variable.assign(now)
        self._batches.assign([0.0, 0.0])

    def note_batch(self, rows: tf.Tensor) -> None:
        """Notes a step's batch; with local updates there are several in a round.

        Args:
            rows: Each local replica's number of rows: int64, shape `[local replicas]`.
        """
        total = tf.cast(tf.reduce_sum(rows), tf.float64)
        self._batches.assign_add(tf.stack([1.0, total]))

    def note_gradients(self, local: Sequence) -> None:
        """Notes the time at which all of this rank's gradients are computed."""
        with tf.control_dependencies(_tensors(local)):
            now = tf.timestamp()
        self._ready.assign(now)
        # Until `note_sums`: gradients that are accumulated are exchanged in a later step.
        self._done.assign(now)

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
        with tf.control_dependencies([spent]):
            now = tf.timestamp()
        spent = tf.cast(spent, tf.float64)
        exchange = tf.reduce_min(spent)
        began, last = self._began.read_value(), self._last.read_value()
        times = [
            now - last,
            self._ready.read_value() - began,
            exchange,
            spent[self.collective.rank] - exchange,
            began - last,
        ]
        sums = tf.concat([[1.0], self._batches.read_value(), times], 0)
        counts = self._counts.read_value()
        self._sums.assign_add(tf.stack([sums, counts * sums]))
        if self.collective.size > 1:
            slow = tf.one_hot(tf.argmin(spent), self.collective.size, dtype=tf.float64)
            self._caused.assign_add(counts * slow * tf.reduce_sum(spent - exchange))
        self._last.assign(now)
        self._counts.assign(1.0)

    def read(self) -> StepTotals:
        """Returns this rank's sums so far."""
        return StepTotals(*self._sums.numpy(), self._caused.numpy())


def _tensors(structure: Sequence) -> list[tf.Tensor]:
    return tf.nest.flatten(structure, expand_composites=True)
