"""Brings what is made outside of the scope for a model of the scope into it.

Optimizers and metrics are made again in the scope before the first step, while they hold nothing;
clones are made there at once.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.models import cloning

from tfdml.runtime.fingerprint import optimizer_config
from tfdml.strategies.keras_seam.current import extended_of, is_ours
from tfdml.strategies.rank_state import optimizers_of
from tfdml.strategies.replica_step import all_metrics

# What making a thing from its configuration raises where it does not support that.
_NO_CONFIG = (NotImplementedError, TypeError, ValueError, KeyError)


def adopt(model: keras.Model) -> None:
    """Brings what a model holds, but was made outside of its strategy's scope, into the scope.

    The objects stay the same: who holds one holds the model's. An optimizer that has trained, a
    metric that has counted, and what cannot be made from its configuration stay outside.

    Args:
        model: A model of one of our strategies.
    """
    strategy = model.distribute_strategy
    for optimizer in optimizers_of(model):
        if optimizer._distribution_strategy is not strategy and not int(optimizer.iterations):
            _make_again(optimizer, _optimizer_like, strategy)
    if extended_of(strategy) is None:
        return  # Parameter servers: metrics are on the chief, wherever they were made.
    for metric in _given_metrics(model):
        if not all(map(_is_distributed, metric.variables)):
            _make_again(metric, _metric_like, strategy)


def _given_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns a model's metrics, those that `compile` was given among them."""
    compiled = getattr(model, "_compile_metrics", None)
    given = [getattr(compiled, f"_user_{kind}", None) for kind in ("metrics", "weighted_metrics")]
    held = [m for m in tree.flatten(given) if isinstance(m, keras.metrics.Metric)]
    # A metric of metrics, such as Keras's own of those of `compile`, has no variables itself.
    return held + [m for m in all_metrics(model) if m._variables]


def _is_distributed(variable: keras.Variable) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)


def _make_again(thing: Any, like: Callable, strategy: tf.distribute.Strategy) -> None:
    try:
        with strategy.scope():
            made = like(thing)
    except _NO_CONFIG:
        return
    if made is not None:
        vars(thing).clear()
        vars(thing).update(vars(made))


def _optimizer_like(optimizer: keras.Optimizer) -> keras.Optimizer:
    config = optimizer_config(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None:
        return type(optimizer).from_config(config)
    del config["inner_optimizer"]
    return type(optimizer)(_optimizer_like(inner), **config)


def _metric_like(metric: keras.metrics.Metric) -> keras.metrics.Metric | None:
    made = type(metric).from_config(metric.get_config())
    pairs = zip(metric.variables, made.variables, strict=True)
    is_fresh = all(np.array_equal(own.numpy(), new.numpy()) for own, new in pairs)
    return made if is_fresh else None


def _clone(original: Callable) -> Callable:
    """`clone_model`: the clone belongs to the model's strategy."""

    def clone(model, *args, **kwargs):
        strategy = model._distribute_strategy
        if not is_ours(strategy) or tf.distribute.get_strategy() is strategy:
            return original(model, *args, **kwargs)
        with strategy.scope():
            return original(model, *args, **kwargs)

    return clone


REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (cloning, "_clone_functional_model", _clone),
    (cloning, "_clone_sequential_model", _clone),
]
