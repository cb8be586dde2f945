"""Runs an aggregator's step on plain arguments."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator, StepFactors, StepGradients


def aggregate(
    aggregator: GradientAggregator,
    gradients: Sequence[Gradient],
    names: Sequence[str],
    label: str,
    loss_scale: tf.Tensor | None = None,
    learning_rate: tf.Tensor | None = None,
) -> list[Gradient]:
    """Returns the sums of one step's gradients."""
    factors = StepFactors(loss_scale, learning_rate)
    return aggregator.aggregate(StepGradients(gradients, names, label, lambda: factors))
