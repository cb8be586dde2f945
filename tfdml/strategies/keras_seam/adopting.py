"""Adoption of models, optimizers and metrics made outside a strategy's scope.

A `keras.Variable` remains the same object with the same value; only the TensorFlow variable behind
it is created again, in the scope. So layers, optimizers and metrics need not be recreated, and
references to them stay valid.
"""

from collections.abc import Callable, Iterable

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.models import cloning
from keras.src.saving import saving_lib, serialization_lib

from tfdml.strategies.alone import check_not_alone, model_made_outside, strategy_made_last
from tfdml.strategies.keras_seam.current import get_extended, is_tfdml_strategy
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.sharded_optimizers import divide_when_built
from tfdml.strategies.replicas.rank_state import optimizers_of
from tfdml.strategies.replicas.replica_step import all_metrics


def adopt(model: keras.Model) -> None:
    """Brings a model's optimizers and metrics into the scope of the model's strategy.

    An optimizer that has already made a step is not adopted.

    Args:
        model: A model of one of our strategies.
    """
    strategy = model.distribute_strategy
    for optimizer in optimizers_of(model):
        if optimizer._distribution_strategy is not strategy and not int(optimizer.iterations):
            _adopt_optimizer(optimizer, strategy)
    if get_extended(strategy) is not None:  # On parameter servers metrics stay on the chief.
        for metric in _given_metrics(model):
            _adopt_variables(metric.variables, strategy)


def adopt_read(model: keras.Model) -> None:
    """Brings a model that was loaded or cloned outside the scope into it, before it trains.

    The model then belongs to the strategy that this process created last. A model that was built
    outside is left alone, because the scope may have been forgotten.

    Args:
        model: A model that is about to train.
    """
    if model._distribute_strategy is not None or not getattr(model, "_tfdml_read", False):
        return
    strategy = strategy_made_last()
    if strategy is None or _partitions(strategy):
        return
    _adopt_variables(model.variables, strategy)
    for optimizer in optimizers_of(model):
        _adopt_optimizer(optimizer, strategy)
    for part in model._flatten_layers():
        if isinstance(part, TensorFlowTrainer):
            part._distribute_strategy = strategy
    # These functions were made for one device.
    model.train_function = model.test_function = model.predict_function = None


def check_made_inside(model: keras.Model, call: str) -> None:
    """Refuses a model that was made outside the scope although it should belong to a strategy.

    That is so if it is used in a scope, if its optimizer was made in one, or if this process
    belongs to a job of several.
    """
    optimizer = getattr(model, "optimizer", None)
    for strategy in (
        tf.distribute.get_strategy(),
        getattr(optimizer, "_distribution_strategy", None),
    ):
        if model._distribute_strategy is None and get_extended(strategy) is not None:
            raise model_made_outside(model, strategy.rank)
    if call in ("fit", "train_on_batch") and not is_tfdml_strategy(model._distribute_strategy):
        check_not_alone(model)


def _partitions(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the strategy partitions variables, which a built optimizer cannot follow."""
    return getattr(strategy.extended, "_variable_partitioner", None) is not None


def _adopt_variables(variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        for variable in variables:
            old = variable._value
            if getattr(old, "_distribute_strategy", None) is not strategy:
                variable._initialize(old.numpy())
                # Optimizers identify a variable by this id.
                getattr(variable._value, "_primary", variable._value)._unique_id = old._unique_id


def _adopt_optimizer(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> None:
    _adopt_variables(optimizer.variables, strategy)
    inner = getattr(optimizer, "inner_optimizer", None)
    for one in (optimizer, inner, *getattr(optimizer, "optimizers", ())):
        if one is not None:
            one._distribution_strategy = strategy
            divide_when_built(one)


def _given_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns a model's metrics, including those given to `compile`."""
    compiled = getattr(model, "_compile_metrics", None)
    given = [getattr(compiled, f"_user_{kind}", None) for kind in ("metrics", "weighted_metrics")]
    held = [m for m in tree.flatten(given) if isinstance(m, keras.metrics.Metric)]
    # A metric that wraps others, such as Keras's own for `compile`, has no variables itself.
    return held + [m for m in all_metrics(model) if m._variables]


def _clone(original: Callable) -> Callable:
    """Wraps `clone_model` so that the clone belongs to the model's strategy."""

    def clone(model, *args, **kwargs):
        strategy = model._distribute_strategy
        if not is_tfdml_strategy(strategy) or tf.distribute.get_strategy() is strategy:
            return original(model, *args, **kwargs)
        with strategy.scope():
            return original(model, *args, **kwargs)

    return clone


def _read(original: Callable) -> Callable:
    """Marks models created from a file, or from a configuration as clones of subclassed models."""

    def read(*args, **kwargs):
        made = original(*args, **kwargs)
        if isinstance(made, keras.Model):
            made._tfdml_read = True
        return made

    return read


REPLACEMENTS: list[Replacement] = [
    (cloning, "_clone_functional_model", _clone),
    (cloning, "_clone_sequential_model", _clone),
    (saving_lib, "deserialize_keras_object", _read),
    (serialization_lib, "deserialize_keras_object", _read),
    (legacy_h5_format, "load_model_from_hdf5", _read),
]
