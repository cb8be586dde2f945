"""Centered clipping: each rank's gradient may differ from the last one by a limited length."""

import math
import numbers
from typing import Any

import tensorflow as tf

from tfdml.aggregation.robust_rule import Combined, VectorRule


class CenteredClipping(VectorRule):
    """Mean of the ranks' gradients, each clipped to a ball around the last step's result.

    A wrong rank then moves the result by `radius` times its fraction of the rows at most, in each
    step. Each rank's momentum is what makes that little: over several steps honest ranks agree, and
    a wrong one that hides within the ball does not average out.

    A rank whose gradient is not finite is left out, as one whose gradient is the center. If half of
    all ranks or more are not finite, the result is not finite either: with loss scaling, an
    overflow.

    Args:
        radius: The largest L2 length of a rank's difference from the center that is not clipped, in
            the units of the gradient of all weights together, without loss scale.
        momentum: Factor by which each rank averages its own gradients over steps: in each step
            `momentum` times the average so far, plus `1 - momentum` times the gradient. From 0 to
            below 1. Leave out the optimizer's own momentum: `SGD(rate)` then moves as far as
            `SGD(rate * (1 - momentum), momentum)` does without this rule.
        iterations: How often the gradients are clipped around the result so far.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Karimireddy et al., "Learning from History for Byzantine Robust Optimization",
        arXiv:2012.10333.
    """

    def __init__(self, radius: float, momentum: float = 0.9, iterations: int = 1):
        if not _is_number(radius) or not radius > 0:
            raise ValueError(
                f"`radius` must be a positive length of gradients. Received: radius={radius!r}."
            )
        if not _is_number(momentum) or not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be a factor from 0 to below 1. Received: momentum={momentum!r}."
            )
        if type(iterations) is not int or iterations < 1:
            raise ValueError(
                f"`iterations` must be a positive integer. Received: iterations={iterations!r}."
            )
        self.radius, self.momentum, self.iterations = float(radius), float(momentum), iterations

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"radius": self.radius, "momentum": self.momentum, "iterations": self.iterations}

    def coefficients(self, products: tf.Tensor, weights: tf.Tensor) -> Combined:
        """Returns the ranks' coefficients; see `VectorRule`."""
        own = tf.linalg.diag_part(products)
        result, cut = tf.zeros_like(weights), None
        for _ in range(self.iterations):
            # The result so far is a sum of differences, so all lengths follow from the products.
            along = tf.linalg.matvec(products, result)
            squared = own - 2 * along + tf.reduce_sum(result * along)
            length = tf.sqrt(tf.maximum(squared, 0))
            factors = tf.minimum(tf.ones_like(length), self.radius / length)
            clipped = weights * factors
            result = result * (1 - tf.reduce_sum(clipped)) + clipped
            cut = 1 - factors if cut is None else cut
        return Combined(result, cut)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and not math.isnan(value)
