"""State that each replica changes on its own in a step: metrics and layers' moving statistics.

After each step it is the same on every replica. Both kinds share one small exchange: a state
returns what its replicas contribute (`contributions`), and receives the sums (`assign`).
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.strategies.input.local_batch import ShareInfo


class MetricState:
    """The metrics' variables during one global step.

    A metric's state is a sum over samples (Keras declares it so: `aggregation="sum"`). A step
    saves the state and sets it to 0, lets every replica add what its share contributes, sums the
    contributions over all replicas, and adds the sum to the saved state. So after every step, every
    process has the state of all data, and reading it is not a collective.

    A padded share contributes nothing, whatever its replica computed.

    Args:
        variables: The variables, declared by `ReplicaExtended.keep_in_step`.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self.variables = list(variables)
        # The first component holds the state, the others 0.
        self._components = [components(v) for v in self.variables]
        self._before: list[tf.Tensor] = []

    def set_aside(self) -> None:
        """Saves the state and sets it to 0."""
        self._before = self.held()
        self.clear()

    def contributions(self, shares: Sequence[ShareInfo]) -> list[tf.Tensor]:
        """Returns what this process's replicas added."""
        return [_sum_of_present(cs, shares, lambda value, share: value) for cs in self._components]

    def assign(self, sums: Sequence[tf.Tensor]) -> keras.StatelessScope:
        """Sets the state to the saved state plus the sums over all replicas.

        Returns:
            A Keras scope in which the variables have this state.
        """
        after = [before + total for before, total in zip(self._before, sums, strict=True)]
        self.hold(after)
        return keras.StatelessScope(state_mapping=list(zip(self.variables, after, strict=True)))

    def held(self) -> list[tf.Tensor]:
        """Returns the state, summed over this process's replicas."""
        return [tf.add_n([c.read_value() for c in cs]) for cs in self._components]

    def hold(self, state: Sequence[tf.Tensor]) -> None:
        """Sets the state."""
        for components, value in zip(self._components, state, strict=True):
            components[0].assign(value)
            for component in components[1:]:
                component.assign(tf.zeros_like(component))

    def clear(self) -> None:
        """Sets the state to 0."""
        for component in (c for cs in self._components for c in cs):
            component.assign(tf.zeros_like(component))


class LayerState:
    """Layers' moving statistics, averaged over replicas and weighted by their rows.

    `BatchNormalization` without `synchronized=True` updates its moving mean and variance from a
    replica's own rows. The average over the replicas is exact for the mean, but the variance lacks
    the variance between the replicas' means.

    Args:
        variables: Floating-point variables that the forward pass may change.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self._components = [components(v) for v in variables]
        self._before: list[tf.Tensor] | None = None

    def set_aside(self) -> None:
        """Saves the statistics, which then stay as they are if no replica of any rank has rows."""
        self._before = [cs[0].read_value() for cs in self._components]

    def contributions(self, shares: Sequence[ShareInfo]) -> list[tf.Tensor]:
        """Returns this process's part of the average, and of the rows if they are set aside."""
        own = [
            _sum_of_present(cs, shares, lambda value, share: value * share.fraction(value.dtype))
            for cs in self._components
        ]
        if self._before:
            own.append(tf.add_n([share.fraction(tf.float32) for share in shares]))
        return own

    def assign(self, sums: Sequence[tf.Tensor]) -> None:
        """Assigns the averages to all of this process's replicas.

        Args:
            sums: Sums of `contributions` over all ranks.
        """
        averages = list(sums)
        if self._before:
            has_rows = averages.pop() > 0
            pairs = zip(averages, self._before, strict=True)
            averages = [tf.where(has_rows, average, before) for average, before in pairs]
        for components, average in zip(self._components, averages, strict=True):
            for component in components:
                component.assign(average)


def moving_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating-point state that a model's layers change in training.

    These are the non-trainable variables of layers that are not frozen.
    """
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(variable.dtype)
    ]


def components(variable: keras.Variable) -> list[tf.Variable]:
    """Returns a variable's copies: one per local device, if it was made in the scope."""
    return list(getattr(variable.value, "values", [variable.value]))


def _sum_of_present(copies, shares: Sequence[ShareInfo], weigh) -> tf.Tensor:
    # `tf.where`, not a product with 0: a padded replica's value may be NaN.
    parts = []
    for component, share in zip(copies, shares, strict=True):
        value = component.read_value()
        parts.append(tf.where(share.rows > 0, weigh(value, share), tf.zeros_like(value)))
    return tf.add_n(parts)
