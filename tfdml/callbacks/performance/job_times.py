"""Times of all ranks' steps since an epoch began, from the clocks inside the steps."""

import dataclasses
import socket
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.texts import gather_texts
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.step_clock import StepClock, StepSums, StepTotals
from tfdml.strategies.replicas.rank_state import RankState


@dataclasses.dataclass(frozen=True)
class RankSums:
    """One rank's steps since an epoch began.

    Attributes:
        rank: The rank.
        host: Name of the rank's host.
        share: Fraction, from 0 to 1, of every batch's rows on which this rank worked.
        sums: Sums over the steps.
        causes: Fraction, from 0 to 1, of all ranks' waiting that this rank caused; None if ranks
            do not wait for each other.
    """

    rank: int
    host: str
    share: float
    sums: StepSums
    causes: float | None


class JobTimes:
    """Reader of the clocks inside a model's train steps, on all ranks.

    The clock belongs to the model's session, and several readers share it.

    Args:
        model: The model.

    Attributes:
        hosts: Name of each rank's host; known once a `fit` has begun.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._collective = RankState(model).collective
        self._clock = get_session(model).observer(StepClock)
        if self._clock is None:
            self._clock = StepClock(self._collective)
            get_session(model).attach(self._clock)
        self._before: StepTotals = self._clock.read()
        self.hosts: list[str] = []

    def begin_fit(self) -> None:
        """Counts the next step apart, because it may be traced; all ranks call this."""
        self._clock.skip()
        self.hosts = gather_texts(self._collective, socket.gethostname(), "job_times/hosts")

    def begin_epoch(self) -> None:
        """Begins the sums."""
        self._clock.begin_epoch()
        self._before = self._clock.read()

    @property
    def steps(self) -> int:
        """The number of this rank's steps since the epoch began, with those counted apart."""
        return self._clock.read().steps - self._before.steps

    def so_far(self) -> dict[int, StepSums]:
        """Returns the sums over all steps so far of the ranks that this process knows: its own."""
        return {self._collective.rank: self._clock.read().sums}

    def gather(self, extra: Sequence[float] = ()) -> tuple[list[RankSums], list[list[float]]]:
        """Returns all ranks' sums since the epoch began; all ranks call this.

        Args:
            extra: Further numbers of this rank, as many on all ranks.

        Returns:
            The ranks' sums, and their further numbers, in rank order.
        """
        own = self._clock.read().since(self._before)
        numbers = [*own.numbers, *extra]
        rows = self._collective.all_gather(tf.constant([numbers], tf.float64), "job_times/sums")
        rows, count = rows.numpy().tolist(), len(own.numbers)
        causes = causes_of(own)
        shares = np.reshape(self._fractions(), [self._collective.size, -1]).sum(1)
        times = [
            RankSums(
                rank,
                self.hosts[rank],
                float(shares[rank]),
                StepSums(*row[:count], caused=own.caused),
                causes[rank],
            )
            for rank, row in enumerate(rows)
        ]
        return times, [row[count:] for row in rows]

    def _fractions(self) -> Sequence[float]:
        split = getattr(self._model.distribute_strategy.extended, "batch_split", None)
        return [1.0] if split is None else split.fractions


def causes_of(sums: StepSums) -> list[float]:
    """Returns the fraction of all ranks' waiting that each rank caused, from 0 to 1."""
    total = sums.caused.sum()
    return (sums.caused / total if total > 0 else np.zeros_like(sums.caused)).tolist()
