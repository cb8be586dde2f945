"""Metrics of the whole data: every process holds the state that one process would have."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.share import Share


class MetricState:
    """The metric variables of a model during one global step.

    A metric's state is a sum over samples (Keras declares it so: `aggregation="sum"`). A step
    sets the state aside and to 0, lets every replica add what its share contributes, sums the
    contributions over all replicas, and adds the sum to what was set aside. So the state is that
    of the whole data on every process after every step, and reading it is no collective.

    A padded share contributes nothing, whatever its replica computed.

    Args:
        variables: The metrics' variables, declared by `ReplicaExtended.keep_in_step`.
        extended: The strategy's extension.
    """

    def __init__(self, variables: Sequence[keras.Variable], extended: ReplicaExtended):
        self._variables = list(variables)
        self._extended = extended
        # One component for each local device; the first holds the state, the others 0.
        self._components = [_components(v) for v in self._variables]
        self._before: list[tf.Tensor] = []

    def set_aside(self) -> None:
        """Remembers the state and sets it to 0."""
        self._before = [tf.add_n([c.read_value() for c in cs]) for cs in self._components]
        for component in (c for cs in self._components for c in cs):
            component.assign(tf.zeros_like(component))

    def put_together(self, shares: Sequence[Share], name: str) -> keras.StatelessScope:
        """Sums what the replicas added, and makes it the state.

        Args:
            shares: The shares of this process's replicas.
            name: What the exchanges are called.

        Returns:
            A scope in which the metrics' variables have the new state.
        """
        added = [
            tf.add_n([_masked(c.read_value(), share) for c, share in zip(cs, shares, strict=True)])
            for cs in self._components
        ]
        sums = _packed_sum(added, self._extended, name)
        after = [before + total for before, total in zip(self._before, sums, strict=True)]
        for components, state in zip(self._components, after, strict=True):
            components[0].assign(state)
            for component in components[1:]:
                component.assign(tf.zeros_like(component))
        return keras.StatelessScope(state_mapping=list(zip(self._variables, after, strict=True)))


def _components(variable: keras.Variable) -> list[tf.Variable]:
    return list(getattr(variable.value, "values", [variable.value]))


def _masked(contribution: tf.Tensor, share: Share) -> tf.Tensor:
    # A choice, not a product: what a padded replica computed may be NaN.
    return tf.where(share.rows > 0, contribution, tf.zeros_like(contribution))


def _packed_sum(
    tensors: Sequence[tf.Tensor], extended: ReplicaExtended, name: str
) -> list[tf.Tensor]:
    """Sums tensors over all processes, all those of a dtype as one vector."""
    sums: list[tf.Tensor | None] = [None] * len(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        packed = tf.concat([tf.reshape(tensors[i], [-1]) for i in places], 0)
        (total,) = extended.collective.all_reduce([packed], f"{name}/{dtype.name}")
        sizes = [tensors[i].shape.num_elements() for i in places]
        for i, part in zip(places, tf.split(total, sizes), strict=True):
            sums[i] = tf.reshape(part, tensors[i].shape)
    return sums
