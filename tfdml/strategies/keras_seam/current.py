"""Whether a model, or the replica that calls, belongs to one of our strategies."""

import keras
import tensorflow as tf

from tfdml.strategies.accumulation import accumulation_steps
from tfdml.strategies.extended import ReplicaExtended
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
