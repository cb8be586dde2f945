"""The parts of global batches that replicas work on, and their change between epochs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.row_split import LocalReplicas, integer_weights

AUTO = "auto"

# New parts are accepted if a step is expected to take at most this fraction of its time.
_WORTH_A_CHANGE = 0.95
# Fraction of the way from the present to the measured parts: a measurement has noise.
_DAMPING = 0.7
# Sum of the weights that are made of measured speeds, for enough digits.
_RESOLUTION = 1 << 16


class BatchSplit:
    """Weights by which the rows of every global batch are dealt to all replicas.

    Given weights stay. With "auto" they begin equal, and those that are planned at an epoch's end
    hold from the next epoch on. They are the same on all processes, and the split of a batch is
    done in its step: batches that were read ahead are split by the weights of their own epoch.

    Args:
        given: Checked `batch_split` of a strategy: integer weights, "auto", or None for equal
            parts.
        replicas: The number of replicas of all processes.

    Attributes:
        is_auto: Whether weights follow from measured times.
        weights: The weights now; None for equal parts.
        planned: The weights of the next epoch.
    """

    def __init__(self, given: tuple[int, ...] | str | None, replicas: int):
        self.is_auto = given == AUTO and replicas > 1
        self.weights: tuple[int, ...] | None = None if given == AUTO else given
        if self.is_auto:
            self.weights = (1,) * replicas
        self.planned = self.weights
        self._replicas = replicas
        self._variable: tf.Variable | None = None

    @property
    def fractions(self) -> list[float]:
        """Each replica's part of a global batch now, from 0 to 1."""
        weights = self.weights or (1,) * self._replicas
        return [weight / sum(weights) for weight in weights]

    def in_step(self) -> Any:
        """Returns the weights for a step: in a graph, those of the time when it runs."""
        if not self.is_auto:
            return self.weights
        if self._variable is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._variable = unmanaged_variable(tf.constant(self.weights, tf.int64))
        return self._variable.read_value()

    def plan(self, weights: Sequence[int] | None) -> None:
        """Sets the weights of the next epoch; those of another number of replicas become equal."""
        if not self.is_auto or weights is None:
            return
        fits = len(weights) == self._replicas
        self.planned = tuple(weights) if fits else (1,) * self._replicas

    def begin_epoch(self) -> None:
        """Makes the planned weights hold; called between two steps."""
        if self.planned == self.weights:
            return
        self.weights = self.planned
        if self._variable is not None:
            self._variable.assign(self.weights)


def balanced(rows: Sequence[float], seconds: Sequence[float]) -> tuple[int, ...] | None:
    """Returns weights by which all replicas take the same time; None if it is not worth a change.

    A replica's time per row is taken to be the same for another number of rows. It is not, if a
    step has a part that does not depend on the rows, so weights are measured again in the next
    epoch.

    Args:
        rows: Rows of each replica in a full global batch.
        seconds: Seconds that each replica took for them.
    """
    own_rows, times = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
    speeds = own_rows / times
    total = int(round(own_rows.sum()))
    best = total * speeds / speeds.sum()
    if (_rows_of(_weights(best), total) / speeds).max() > _WORTH_A_CHANGE * times.max():
        return None
    return _weights(own_rows + _DAMPING * (best - own_rows))


def _weights(parts: np.ndarray) -> tuple[int, ...]:
    scaled = np.round(parts * (_RESOLUTION / parts.sum()))
    return integer_weights([max(1, int(part)) for part in scaled])


def _rows_of(weights: tuple[int, ...], total: int) -> np.ndarray:
    replicas = len(weights)
    return np.diff(LocalReplicas(0, replicas, replicas, weights).bounds(total))
