"""Base classes of robust rules: pure functions of the ranks' gradients, no communication.

A rule sees each rank's own mean gradient, over the rows that the rank has of the global batch, and
the fraction of the batch's rows that these are. With no rank left out it returns the mean of the
rows, which is the mean of the ranks weighted by their fractions.
"""

import abc
from typing import Any, NamedTuple

import tensorflow as tf


class Combined(NamedTuple):
    """Result of a rule on the ranks' gradients.

    Attributes:
        values: The combined gradient, or each rank's coefficient in it; see the rule's method.
        cut: How much of each rank's gradient was left out, from 0 to 1: `[ranks]`.
    """

    values: tf.Tensor
    cut: tf.Tensor


class RobustRule:
    """Base class of rules that combine the ranks' gradients so that a few wrong ones do little.

    Attributes:
        momentum: Factor by which each rank averages its own gradients over steps before the rule
            sees them, from 0 to below 1; 0 for the gradients as they are.
    """

    momentum: float = 0.0

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    def check_ranks(self, ranks: int) -> None:
        """Refuses a number of ranks that is too small for the rule.

        Args:
            ranks: The number of ranks whose gradients are combined.

        Raises:
            ValueError: If it is too small.
        """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class CoordinateRule(RobustRule, abc.ABC):
    """Base class of rules that combine each number of the gradients on its own."""

    @abc.abstractmethod
    def combine(self, means: tf.Tensor, weights: tf.Tensor) -> Combined:
        """Combines some of the gradients' numbers.

        Args:
            means: Each rank's mean gradient, 0 without rows: float, `[ranks, numbers]`.
            weights: Each rank's fraction of the batch's rows, 0 without rows: float, `[ranks]`.

        Returns:
            The combined numbers, `[numbers]`, and the fraction of each rank's that was left out.
        """


class VectorRule(RobustRule, abc.ABC):
    """Base class of rules that give each rank's whole gradient a coefficient.

    Gradients are seen from a center, the combined gradient of the last step, at first 0. The
    combined gradient is the center plus the sum of the ranks' differences from it, each times its
    coefficient.
    """

    @abc.abstractmethod
    def coefficients(self, products: tf.Tensor, weights: tf.Tensor) -> Combined:
        """Returns the ranks' coefficients.

        Args:
            products: Inner products of the ranks' differences from the center, of which those of a
                rank that is not finite are 0: float64, `[ranks, ranks]`.
            weights: Each rank's fraction of the batch's rows; 0 for a rank without rows, or that is
                not finite: float64, `[ranks]`.

        Returns:
            The coefficients, `[ranks]`, and how much of each rank's difference was left out.
        """
