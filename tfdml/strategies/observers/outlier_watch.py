"""Watch for ranks whose gradients a robust rule has cut, or that are far from the others'."""

import dataclasses

import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable


@dataclasses.dataclass(frozen=True)
class RankGradients:
    """How a rank's gradients compare with the combined ones, as means over steps.

    Attributes:
        rank: The rank; with a single process, its device.
        often: Fraction of steps, from 0 to 1, in which the rank was an outlier.
        distance: L2 distance of its gradient from the combined one, divided by that of the median
            rank; of steps in which it was finite.
        cut: How much of its gradient was left out, from 0 to 1: the fraction of numbers that were
            trimmed, or of its difference that was clipped.
        not_finite: Number of steps in which its gradient was not finite.
    """

    rank: int
    often: float
    distance: float
    cut: float
    not_finite: int


class OutlierWatch:
    """Observer of what a robust rule leaves out of each rank's gradient.

    Owners of chunks see all ranks' numbers of their chunk alone; they add up what they see in the
    message that carries a step's metrics.

    Args:
        ranks: The number of ranks whose gradients are combined.
        threshold: Multiple of the median rank's distance from which a rank is an outlier.
    """

    def __init__(self, ranks: int, threshold: float):
        self._threshold = threshold
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            # Of this step and this process's chunks, for each rank: the numbers that were left out,
            # squared distances; and how many numbers there are.
            self._own = zeros(3, ranks)
            # Over steps, for each rank: being an outlier, relative distances, cuts, steps in which
            # it was not finite; and all steps.
            self._sums = zeros(5, ranks)

    def reset(self) -> None:
        """Begins the sums over steps."""
        self._sums.assign(tf.zeros_like(self._sums))

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch has arrived."""
        self._own.assign(tf.zeros_like(self._own))

    def note(self, cut: tf.Tensor, apart: tf.Tensor) -> None:
        """Notes what a rule has left out of a chunk, in the graph of a step.

        Args:
            cut: How much of each rank's gradient was left out, from 0 to 1: `[ranks]`.
            apart: The ranks' differences from the combined gradient: `[ranks, numbers]`.
        """
        cut, apart = tf.cast(cut, tf.float64), tf.cast(apart, tf.float32)
        count = tf.ones_like(cut) * float(apart.shape[1])
        squared = tf.cast(tf.reduce_sum(tf.square(apart), 1), tf.float64)
        self._own.assign_add(tf.stack([cut * count, squared, count]))

    def slots(self) -> tf.Tensor:
        """Returns what this process's chunks show: float32, shape `[3, ranks]`."""
        return tf.cast(self._own.read_value(), tf.float32)

    def add(self, total: tf.Tensor) -> None:
        """Adds a step, if it has combined gradients: float32, shape `[3, ranks]`."""
        left_out, squared, numbers = tf.unstack(tf.cast(total, tf.float64))
        is_finite = tf.math.is_finite(squared)
        far = tf.sqrt(tf.where(is_finite, squared, tf.constant(float("inf"), tf.float64)))
        median = tf.sort(far)[(far.shape[0] - 1) // 2]
        ratio = tf.math.divide_no_nan(tf.where(is_finite, far, 0), median)
        is_outlier = ~is_finite | (ratio >= self._threshold)
        seen = [is_outlier, ratio, left_out / numbers, ~is_finite, is_finite | True]
        # A step that accumulates gradients has combined none; one whose median is not finite tells
        # nothing of single ranks.
        tells = tf.math.is_finite(median) & (numbers[0] > 0)
        steps = tf.stack([tf.cast(value, tf.float64) for value in seen])
        self._sums.assign_add(tf.where(tells, steps, tf.zeros_like(steps)))

    def read(self) -> list[RankGradients]:
        """Returns what was seen since `reset`, the same on all ranks; empty without steps."""
        often, distance, cut, not_finite, steps = self._sums.numpy().tolist()
        if not steps[0]:
            return []
        return [
            RankGradients(
                rank,
                often[rank] / count,
                distance[rank] / max(count - not_finite[rank], 1),
                cut[rank] / count,
                int(not_finite[rank]),
            )
            for rank, count in enumerate(steps)
        ]
