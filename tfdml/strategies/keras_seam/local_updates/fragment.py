"""Parts of a model whose weights are synchronized together."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients
from tfdml.local_updates import LocalUpdates
from tfdml.strategies.keras_seam.current import updating
from tfdml.strategies.replicas.gradient_exchange import sum_over_replicas
from tfdml.strategies.replicas.step_state import components


class Fragment:
    """Weights that are synchronized together, their last common values, and their outer optimizer.

    Args:
        number: Number of the fragment, from 0.
        weights: The fragment's trainable variables.
        names: Distinct names of the weights.
        method: Method that gives the outer optimizer.
        strategy: The model's strategy.

    Attributes:
        anchors: The weights after the last synchronization, the same on all ranks.
        outer: The outer optimizer, which updates the anchors.
    """

    def __init__(
        self,
        number: int,
        weights: Sequence[keras.Variable],
        names: Sequence[str],
        method: LocalUpdates,
        strategy: tf.distribute.Strategy,
    ):
        self.weights, self._names = list(weights), list(names)
        self._label = f"local_updates/{number}"
        self._strategy, self._extended = strategy, strategy.extended
        # Their values are the same on all ranks without an exchange: zeros, until a round begins.
        with strategy.scope(), strategy.extended.making_own_variables():
            self.anchors = [
                keras.Variable("zeros", shape=v.shape, dtype=v.dtype, name=v.name)
                for v in self.weights
            ]
            self.outer = method.make_outer_optimizer()
            self.outer.build(self.anchors)

    def begin(self) -> None:
        """Makes the weights the last common ones; all ranks have the same."""
        _copy(self.weights, self.anchors)

    def synchronize(self, fraction: tf.Tensor) -> tf.Tensor:
        """Gives all ranks the same weights; called outside of replicas, by all ranks.

        Args:
            fraction: Fraction of the rows since the last synchronization that were this rank's:
                float64, shape `[]`.

        Returns:
            A sum that has arrived from the other ranks.
        """
        totals = self._strategy.run(self._update_anchors, args=(fraction,))
        _copy(self.anchors, self.weights)
        return self._extended.parts_of(totals)[0]

    def _update_anchors(self, fraction: tf.Tensor) -> tf.Tensor:
        """Updates the anchors by the mean of what the ranks' weights have moved by, in a replica.

        The replicas of a rank have the same weights: each sends its part of the rank's move.
        """
        part = fraction / self._extended.num_local_replicas
        moves = [
            tf.convert_to_tensor(anchor) - tf.convert_to_tensor(weight)
            for anchor, weight in zip(self.anchors, self.weights, strict=True)
        ]
        own = StepGradients(
            [move * tf.cast(part, move.dtype) for move in moves], self._names, self._label
        )
        aggregator = self._extended.get_aggregator(self.outer)
        totals = sum_over_replicas(self._extended, aggregator, own)
        with updating():
            self.outer.apply(totals, self.anchors)
        return totals[0]


def _copy(variables: Sequence[keras.Variable], to: Sequence[keras.Variable]) -> None:
    for variable, other in zip(variables, to, strict=True):
        for own, copied in zip(components(variable), components(other), strict=True):
            copied.assign(own.read_value())


def divide(count: int, fragments: int) -> list[list[int]]:
    """Returns the indices of each fragment's variables: strided, so that all have early layers.

    Args:
        count: Number of variables.
        fragments: Number of fragments; those without a variable are left out.
    """
    return [list(range(first, count, fragments)) for first in range(min(fragments, count))]
