"""Parts of a model whose weights are synchronized together."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients
from tfdml.local_updates import LocalUpdates
from tfdml.strategies.keras_seam.current import updating
from tfdml.strategies.keras_seam.step.optimizers import distinct_names, inner_of
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
            [move * tf.cast(part, move.dtype) for move in moves],
            self._names,
            self._label,
            weight=part,
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


def make_fragments(model: keras.Model, method: LocalUpdates) -> list[Fragment]:
    """Returns the fragments of a model: strided parts of its weights, so all have early layers.

    Args:
        model: The model, built and compiled.
        method: The method of local updates; fragments that would have no weight are left out.

    Raises:
        ValueError: If a weight cannot be averaged.
    """
    weights = list(model.trainable_variables)
    _refuse_replaced(weights)
    names = distinct_names(inner_of(model.optimizer), weights)
    count = min(method.num_fragments, len(weights))
    strategy = model.distribute_strategy
    return [Fragment(i, weights[i::count], names[i::count], method, strategy) for i in range(count)]


def _refuse_replaced(weights: Sequence[keras.Variable]) -> None:
    for variable in weights:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"`local_updates` must not be used with float8 training, because the mean of the "
                f"ranks' scales is no scale. Received: {variable.path}, whose gradient replaces "
                f"its value. Leave out `local_updates`, or train in mixed_bfloat16."
            )
