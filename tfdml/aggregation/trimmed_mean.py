"""Trimmed mean: the mean of each number without the ranks' highest and lowest ones."""

import math
from typing import Any

import tensorflow as tf

from tfdml.aggregation.robust_rule import Combined, CoordinateRule


class TrimmedMean(CoordinateRule):
    """Mean of each number of the gradients, without the highest and the lowest ones of the ranks.

    Up to `num_byzantine` wrong ranks then move no number beyond those of the others. Numbers that
    are not finite count as the highest ones.

    Ranks are counted, rows are not: the mean of the numbers that are left is weighted by rows. A
    rank without rows in a batch is not counted, and a batch that has rows on no more than
    `2 * num_byzantine` ranks gives a gradient of 0, because none of them can be trusted.

    A number that differs from 0 on no more than `num_byzantine` ranks gives 0. So rows of an
    embedding that few ranks look up in a step are not trained in it.

    Args:
        num_byzantine: Number of ranks whose gradients may be wrong: as many of the highest, and of
            the lowest, are left out. With 0 the result is the mean.

    Raises:
        ValueError: If `num_byzantine` is not a number of ranks.

    Reference:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
        arXiv:1803.01498.
    """

    def __init__(self, num_byzantine: int = 1):
        if type(num_byzantine) is not int or num_byzantine < 0:
            raise ValueError(
                f"`num_byzantine` must be a number of ranks, 0 or more. Received: "
                f"num_byzantine={num_byzantine!r}."
            )
        self.num_byzantine = num_byzantine

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"num_byzantine": self.num_byzantine}

    def check_ranks(self, ranks: int) -> None:
        """Refuses a number of ranks that is too small; see `RobustRule`.

        A single rank has nothing to compare with; its gradients are taken as they are.
        """
        if 1 < ranks <= 2 * self.num_byzantine:
            raise ValueError(
                f"`gradient_aggregation` must leave a rank between the highest and the lowest "
                f"ones: more than 2 * num_byzantine ranks are needed. Received: {self!r} for "
                f"{ranks} ranks. Start {2 * self.num_byzantine + 1} or more, or use "
                f"tfdml.aggregation.CenteredClipping."
            )

    def combine(self, means: tf.Tensor, weights: tf.Tensor) -> Combined:
        """Returns the trimmed mean; see `CoordinateRule`."""
        trimmed = self.num_byzantine if means.shape[0] > 1 else 0
        return Combined(*_trimmed_mean(means, weights, trimmed))


# XLA reads each number once, however many ranks are compared.
@tf.function(jit_compile=True, autograph=False)
def _trimmed_mean(
    means: tf.Tensor, weights: tf.Tensor, trimmed: int
) -> tuple[tf.Tensor, tf.Tensor]:
    present = weights[:, tf.newaxis] > 0
    # Ranks without rows come last, after those that are not finite.
    keys = tf.where(tf.math.is_finite(means), means, means.dtype.max)
    keys = tf.where(present, keys, math.inf)
    places = tf.zeros_like(keys, tf.int32)
    ranks = tf.range(keys.shape[0])[:, tf.newaxis]
    for rank in range(keys.shape[0]):
        is_before = (keys[rank] < keys) | ((keys[rank] == keys) & (rank < ranks))
        places += tf.cast(is_before, tf.int32)
    count = tf.reduce_sum(tf.cast(present, tf.int32))
    is_kept = (places >= trimmed) & (places < count - trimmed)
    kept = tf.where(is_kept, weights[:, tf.newaxis], tf.zeros_like(means))
    # `tf.where`, not a product with 0: a number that is left out may be NaN.
    total = tf.reduce_sum(tf.where(is_kept, means * kept, tf.zeros_like(means)), 0)
    share = tf.math.divide_no_nan(tf.reduce_sum(weights), tf.reduce_sum(kept, 0))
    # Of equal numbers none lies outside.
    lowest = tf.reduce_min(tf.where(is_kept, means, math.inf), 0)
    highest = tf.reduce_max(tf.where(is_kept, means, -math.inf), 0)
    is_outside = present & ~((means >= lowest) & (means <= highest))
    return total * share, tf.reduce_mean(tf.cast(is_outside, means.dtype), 1)
