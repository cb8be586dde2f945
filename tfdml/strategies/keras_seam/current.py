"""Whether a model, or the replica that calls, belongs to one of our strategies."""

import contextlib
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdml.strategies.accumulation import accumulation_steps
from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.keras_seam.hooks import hooks_of
from tfdml.strategies.parameter_server.step_scope import current_step
from tfdml.strategies.share import Share


def extended_of(strategy: tf.distribute.Strategy | None) -> ReplicaExtended | None:
    """Returns a strategy's extension, if it is ours."""
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, ReplicaExtended) else None


def replicas_of(model: keras.Model) -> ReplicaExtended | None:
    """Returns the extension of the model's strategy, if it is ours and its steps are global.

    One replica takes Keras's own steps, but for accumulation: Keras's crashes in any strategy.
    """
    extended = extended_of(model._distribute_strategy)
    if extended is None or (extended._num_replicas_in_sync == 1 and not accumulation_steps(model)):
        return None
    return extended


def current_strategy() -> tf.distribute.Strategy | None:
    """Returns the strategy that the caller is a replica of, if it is one of ours."""
    replica = tf.distribute.get_replica_context()
    strategy = replica.strategy if replica is not None else None
    return strategy if is_ours(strategy) else None


# The replicas, by strategy, that are in the update of an optimizer: what it hands on to another one
# inside it is summed already. By replica, because they take turns, and `merge_call` has threads.
_updating: weakref.WeakKeyDictionary[tf.distribute.Strategy, set[int]]
_updating = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """While this is entered, the calling replica is in the update of an optimizer."""
    replica = tf.distribute.get_replica_context()
    replicas, own = _updating.setdefault(replica.strategy, set()), replica._local_replica_id
    outer = own in replicas
    replicas.add(own)
    try:
        yield
    finally:
        if not outer:
            replicas.discard(own)


def is_updating() -> bool:
    """Returns whether the calling replica is in the update of an optimizer."""
    replica = tf.distribute.get_replica_context()
    return replica._local_replica_id in _updating.get(replica.strategy, ())


def is_outside_of_replicas() -> bool:
    """Returns whether the caller is in the scope of one of our strategies, but in no replica."""
    return tf.distribute.in_cross_replica_context() and is_ours(tf.distribute.get_strategy())


def is_ours(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether a strategy is one of ours, parameter servers included."""
    return hooks_of(strategy) is not None


def current_extended() -> ReplicaExtended | None:
    """Returns the extension of the strategy that the caller is a replica of, if it is ours."""
    replica = tf.distribute.get_replica_context()
    return extended_of(replica.strategy) if replica is not None else None


def current_replicas() -> ReplicaExtended | None:
    """Returns the same, if there are gradients to exchange or to gather."""
    extended = current_extended()
    if extended is None:
        return None
    several = extended._num_replicas_in_sync > 1
    return extended if several or extended.accumulator is not None else None


def current_share() -> Share | None:
    """Returns the share of the replica, or of the parameter servers' step, that calls."""
    step = current_step()
    if step is not None:
        return step.share
    extended = current_replicas()
    return extended.current_share() if extended is not None else None
