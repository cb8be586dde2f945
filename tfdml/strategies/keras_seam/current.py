"""Lookup of the strategy of ours that a model, or the calling replica, belongs to."""

import contextlib
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdml.strategies.aggregation.accumulation import accumulation_steps
from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.keras_seam.hooks import get_hooks
from tfdml.strategies.parameter_server.step.step_scope import current_step
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.traced import traced


def get_extended(strategy: tf.distribute.Strategy | None) -> ReplicaExtended | None:
    """Returns a strategy's extension if it is one of our synchronous strategies, else None."""
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, ReplicaExtended) else None


def get_replicas(model: keras.Model) -> ReplicaExtended | None:
    """Returns the extension of the model's strategy if it is ours and its steps are global.

    A single replica takes Keras's own steps, except with gradient accumulation, because Keras's
    accumulation crashes in any strategy, and with local updates.
    """
    extended = get_extended(model._distribute_strategy)
    if extended is None:
        return None
    is_global = extended.works_on_shares or extended.local_updates is not None
    return extended if is_global or accumulation_steps(model) else None


def current_strategy() -> tf.distribute.Strategy | None:
    """Returns the strategy whose replica is calling, if it is one of ours, else None."""
    replica = tf.distribute.get_replica_context()
    strategy = replica.strategy if replica is not None else None
    return strategy if is_tfdml_strategy(strategy) else None


# The replicas, by strategy, that are inside an optimizer's update: the gradients that it passes to
# an inner optimizer are already summed. Tracked per replica, because replicas run in turns, and
# `merge_call` uses threads.
_updating: weakref.WeakKeyDictionary[tf.distribute.Strategy, set[int]]
_updating = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Context manager: the calling replica is inside an optimizer's update."""
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
    """Returns whether the calling replica is inside an optimizer's update."""
    replica = tf.distribute.get_replica_context()
    return replica._local_replica_id in _updating.get(replica.strategy, ())


def is_outside_of_replicas() -> bool:
    """Returns whether the caller is in the scope of one of our strategies, outside of replicas."""
    return tf.distribute.in_cross_replica_context() and is_tfdml_strategy(
        tf.distribute.get_strategy()
    )


def is_tfdml_strategy(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether a strategy is one of ours, including parameter servers."""
    return get_hooks(strategy) is not None


def current_extended() -> ReplicaExtended | None:
    """Returns the extension of the strategy whose replica is calling, if it is ours, else None."""
    replica = tf.distribute.get_replica_context()
    return get_extended(replica.strategy) if replica is not None else None


def current_replicas() -> ReplicaExtended | None:
    """Returns the same if there are gradients to exchange or accumulate, or shares; else None."""
    extended = current_extended()
    if extended is None:
        return None
    return extended if extended.works_on_shares or extended.accumulator is not None else None


def current_share() -> ShareInfo | None:
    """Returns the share of the calling replica, microbatch or parameter-server step, or None."""
    step = current_step()
    if step is not None:
        return step.share
    if traced().share is not None:
        return traced().share
    extended = current_replicas()
    return extended.current_share() if extended is not None else None
