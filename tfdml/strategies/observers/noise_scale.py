"""Gradient noise scale, estimated from the gradients that a step exchanges anyway."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable


@dataclasses.dataclass(frozen=True)
class NoiseEstimate:
    """Estimate of the gradient noise from the steps so far.

    Attributes:
        steps: Number of updates used in the estimate.
        signal: Squared norm of the true gradient.
        noise: Trace of the covariance of one row's gradient.
    """

    steps: int
    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The gradient noise scale in rows: NaN before a step, infinite without positive signal."""
        if not self.steps:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf


class NoiseScale:
    """Observer that estimates the gradient noise scale, tr(Σ) / |G|², in rows of the global batch.

    A replica's gradient is a mean over few rows, the exchanged gradient a mean over many: the
    difference of their squared norms is noise. The ranks share their norms in the message that
    carries the metrics. Replicas may have different numbers of rows: gradients are weighed by
    them. Overflows are left out, and so are batches of which one replica has all rows. With lossy
    compression, the codec's error counts as noise.

    Reference:
        McCandlish et al., An Empirical Model of Large-Batch Training, appendix A.1
        (https://arxiv.org/abs/1812.06162).

    Args:
        decay: Decay factor of the moving averages, in [0, 1).
    """

    def __init__(self, decay: float):
        self._decay = decay
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            # Of this step: squared norms of the replicas' and the exchanged gradients, and rows;
            # squares of the replicas' fractions of the rows.
            self._own, self._whole, self._rows, self._squares = zeros(), zeros(), zeros(), zeros()
            self._averages = zeros(2)  # Signal and noise.
            self._steps = zeros()

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch has arrived."""
        for variable in (self._own, self._whole, self._rows, self._squares):
            variable.assign(0.0)

    def observe(
        self,
        local: Sequence[Sequence],
        sums: Sequence,
        loss_scale: tf.Tensor | None,
        rows: tf.Tensor,
        fractions: Sequence[tf.Tensor],
    ) -> None:
        """Notes the gradients of an update; a step with several optimizers has several updates.

        Args:
            local: Each gradient's parts, one per local replica.
            sums: Each gradient's sum over all replicas.
            loss_scale: Loss scale that multiplies the gradients; None for 1.
            rows: Number of rows of the global batches behind the gradients: int64, shape `[]`.
            fractions: Each local replica's fraction of these rows: float64, shape `[]`.
        """
        factor = 1.0 if loss_scale is None else 1.0 / tf.cast(loss_scale, tf.float64) ** 2
        own = [_squared_norm(part) for parts in local for part in parts]
        self._own.assign_add(tf.add_n(own) * factor)
        self._whole.assign_add(tf.add_n([_squared_norm(total) for total in sums]) * factor)
        self._rows.assign(tf.cast(rows, tf.float64))
        self._squares.assign(tf.add_n([tf.square(fraction) for fraction in fractions]))

    def slots(self) -> tf.Tensor:
        """Returns sums over this rank's replicas: squared norms, squared fractions of the rows."""
        own = tf.stack([self._own.read_value(), self._squares.read_value()])
        return tf.cast(own, tf.float32)

    def add(self, own: tf.Tensor) -> None:
        """Adds a step to the averages, if it had a usable update.

        Args:
            own: Sums over all replicas: squared norms, squared fractions: float32, shape `[2]`.
        """
        whole, rows = self._whole.read_value(), self._rows.read_value()
        # A replica's gradient is its part of the global mean: for a fraction f of R rows, f times
        # the mean over its own rows. Its squared norm is expected to be f² signal + f noise / R.
        small, squares = tf.unstack(tf.cast(own, tf.float64))
        signal = (whole - small) / (1 - squares)
        noise = (whole - signal) * rows
        tells = (whole > 0) & (squares < 1) & tf.math.is_finite(small + whole)
        old = self._averages.read_value()
        new = self._decay * old + (1 - self._decay) * tf.stack([signal, noise])
        self._averages.assign(tf.where(tells, new, old))
        self._steps.assign_add(tf.cast(tells, tf.float64))

    def read(self) -> NoiseEstimate:
        """Returns the estimate so far, which is the same on all ranks."""
        steps = int(self._steps.numpy())
        # Bias correction as in Adam, because the averages start at 0.
        correction = 1 - self._decay**steps if steps else 1.0
        signal, noise = (self._averages.numpy() / correction).tolist()
        return NoiseEstimate(steps, signal, noise)


def _squared_norm(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns a gradient's squared norm: float64, shape `[]`."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values  # Each row occurs once.
    return tf.cast(tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32))), tf.float64)
