"""How noisy gradients are: estimated from what the exchange of a step sees anyway."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.own_variable import own_variable


@dataclasses.dataclass(frozen=True)
class NoiseEstimate:
    """What the steps so far tell.

    Attributes:
        steps: The updates that it was made of.
        signal: The squared norm of the true gradient.
        noise: The trace of the covariance of one row's gradient.
    """

    steps: int
    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The gradient noise scale in rows: NaN before a step, infinite where noise hides all."""
        if not self.steps:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf


class NoiseScale:
    """Estimates the gradient noise scale, tr(Σ) / |G|², in rows of the global batch.

    A replica's gradient is a mean over few rows, the exchanged one over many: the difference of
    their squared norms is noise. The ranks tell each other their norms with the metrics, in the
    message that is sent anyway. Batches whose rows the replicas do not share evenly are left out,
    and so is what overflows. With lossy compression the codec's error counts as noise.

    Reference:
        McCandlish et al., An Empirical Model of Large-Batch Training, appendix A.1
        (https://arxiv.org/abs/1812.06162).

    Args:
        replicas: The number of replicas of all processes, 2 or more.
        decay: How much of the moving averages a step keeps, from 0 to below 1.
    """

    def __init__(self, replicas: int, decay: float):
        self._replicas = replicas
        self._decay = decay
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: own_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            # In this step: the replicas' squared norms, the exchanged gradients', and the rows.
            self._own, self._whole, self._rows = zeros(), zeros(), zeros()
            self._averages = zeros(2)  # Signal and noise.
            self._steps = zeros()

    def begin(self) -> None:
        """A step begins; called in its graph once the batch is there."""
        for variable in (self._own, self._whole, self._rows):
            variable.assign(0.0)

    def observe(
        self,
        local: Sequence[Sequence],
        sums: Sequence,
        loss_scale: tf.Tensor | None,
        rows: tf.Tensor,
    ) -> None:
        """Notes the gradients of an update; a step with several optimizers has several.

        Args:
            local: For each gradient its parts, one for each of this process's replicas.
            sums: For each gradient the sum over all replicas.
            loss_scale: What they are multiplied by; None for 1.
            rows: The rows of the global batches that they come of: int64, shape `[]`.
        """
        factor = 1.0 if loss_scale is None else 1.0 / tf.cast(loss_scale, tf.float64) ** 2
        own = [_squared_norm(part) for parts in local for part in parts]
        self._own.assign_add(tf.add_n(own) * factor)
        self._whole.assign_add(tf.add_n([_squared_norm(total) for total in sums]) * factor)
        self._rows.assign(tf.cast(rows, tf.float64))

    def slots(self) -> tf.Tensor:
        """Returns this rank's part of what the ranks add up: float32, shape `[1]`."""
        return tf.cast(self._own.read_value()[tf.newaxis], tf.float32)

    def add(self, own: tf.Tensor) -> None:
        """Adds a step up, where there was an update that tells something.

        Args:
            own: The sum of all replicas' squared norms: float32, shape `[1]`.
        """
        replicas = float(self._replicas)
        whole, rows = self._whole.read_value(), self._rows.read_value()
        # A replica's gradient is its part of the global mean: 1/N of its own rows' mean.
        small = tf.cast(own[0], tf.float64) * replicas
        signal = (whole - small / replicas) / (1 - 1 / replicas)
        noise = (small - whole) * rows / (replicas - 1)
        tells = (whole > 0) & (rows % replicas == 0) & tf.math.is_finite(small + whole)
        old = self._averages.read_value()
        new = self._decay * old + (1 - self._decay) * tf.stack([signal, noise])
        self._averages.assign(tf.where(tells, new, old))
        self._steps.assign_add(tf.cast(tells, tf.float64))

    def read(self) -> NoiseEstimate:
        """Returns the estimate so far: the same on all ranks."""
        steps = int(self._steps.numpy())
        # The averages began at 0: Adam's correction.
        correction = 1 - self._decay**steps if steps else 1.0
        signal, noise = (self._averages.numpy() / correction).tolist()
        return NoiseEstimate(steps, signal, noise)


def _squared_norm(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns a gradient's squared norm: float64, shape `[]`."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values  # Each row is there once.
    return tf.cast(tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32))), tf.float64)
