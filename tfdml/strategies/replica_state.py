"""State that replicas change for themselves in a step: metrics, and moving statistics of layers.

After each step it is the same on every replica. Both kinds take part in one small exchange: a state
says what its replicas contribute (`contributions`), and is given the sums (`assign`).
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.strategies.share import Share


class MetricState:
    """The metrics' variables during one global step: those of the whole data on every process.

    A metric's state is a sum over samples (Keras declares it so: `aggregation="sum"`). A step
    sets the state aside and to 0, lets every replica add what its share contributes, sums the
    contributions over all replicas, and adds the sum to what was set aside. So the state is that
    of the whole data on every process after every step, and reading it is no collective.

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
        """Remembers the state and sets it to 0."""
        self._before = [tf.add_n([c.read_value() for c in cs]) for cs in self._components]
        for component in (c for cs in self._components for c in cs):
            component.assign(tf.zeros_like(component))

    def contributions(self, shares: Sequence[Share]) -> list[tf.Tensor]:
        """Returns what this process's replicas added."""
        return [_sum_of_present(cs, shares, lambda value, share: value) for cs in self._components]

    def assign(self, sums: Sequence[tf.Tensor]) -> keras.StatelessScope:
        """Makes what was set aside and the sums over all replicas the state.

        Returns:
            A scope in which the variables have this state.
        """
        after = [before + total for before, total in zip(self._before, sums, strict=True)]
        for components, state in zip(self._components, after, strict=True):
            components[0].assign(state)
            for component in components[1:]:
                component.assign(tf.zeros_like(component))
        return keras.StatelessScope(state_mapping=list(zip(self.variables, after, strict=True)))


class LayerState:
    """Moving statistics and the like: each replica's, averaged by the rows of its share.

    `BatchNormalization` without `synchronized=True` moves its mean and variance by those of a
    replica's own rows. The average over the replicas is exact for the mean, while the variance
    leaves out how the replicas' means differ.

    Args:
        variables: Floating-point variables that the forward pass may change.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self._components = [components(v) for v in variables]

    def contributions(self, shares: Sequence[Share]) -> list[tf.Tensor]:
        """Returns this process's part of the average."""
        return [
            _sum_of_present(cs, shares, lambda value, share: value * share.fraction(value.dtype))
            for cs in self._components
        ]

    def assign(self, averages: Sequence[tf.Tensor]) -> None:
        """Gives all of this process's replicas the average."""
        for components, average in zip(self._components, averages, strict=True):
            for component in components:
                component.assign(average)


def moving_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating-point state that the layers of a model change in training.

    That is what layers declared not trainable by gradients; frozen layers change nothing.
    """
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(variable.dtype)
    ]


def components(variable: keras.Variable) -> list[tf.Variable]:
    """Returns a variable's copies: one for each local device, if it was made in the scope."""
    return list(getattr(variable.value, "values", [variable.value]))


def _sum_of_present(copies, shares: Sequence[Share], weigh) -> tf.Tensor:
    # A choice, not a product with 0: what a padded replica computed may be NaN.
    parts = []
    for component, share in zip(copies, shares, strict=True):
        value = component.read_value()
        parts.append(tf.where(share.rows > 0, weigh(value, share), tf.zeros_like(value)))
    return tf.add_n(parts)
