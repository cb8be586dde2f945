"""Checks for habits from Horovod's Keras API that are wrong or needless in a strategy's scope."""

import inspect
import math
import types
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.collective import Collective

# Packages whose functions are between these checks and the code that calls `fit`.
_BETWEEN = ("tfdml", "keras", "contextlib")


def check(model: keras.Model, arguments: Mapping[str, Any], collective: Collective) -> None:
    """Refuses, or warns about, what the strategy already does itself; called before the first step.

    Args:
        model: The model whose `fit`, `evaluate` or `predict` is called.
        arguments: The call's arguments.
        collective: The strategy's collective.

    Raises:
        ValueError: If the optimizer or a callback is Horovod's, if the optimizer or weights were
            made outside the scope, or if the data are already distributed.
    """
    for name in ("x", "validation_data"):
        _check_not_distributed(name, arguments.get(name))
    for weight in model.weights:
        if not isinstance(weight.value, tf.distribute.DistributedValues):
            raise ValueError(
                "Weights must be made in the strategy's scope, like the model. Received: "
                f"{weight.path}, made outside. Move `model.build(...)`, or the first call of the "
                "model, under `with strategy.scope():`."
            )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and _is_horovods(optimizer):
        raise ValueError(
            "`optimizer` must be a plain Keras optimizer, because the strategy sums the "
            f"gradients. Received: {type(optimizer).__name__}, made by Horovod's "
            "`DistributedOptimizer`. Pass the optimizer itself to `compile`."
        )
    made_in = getattr(optimizer, "_distribution_strategy", model.distribute_strategy)
    if made_in is not model.distribute_strategy:
        raise ValueError(
            "`optimizer` must be made in the strategy's scope, like the model. Received: "
            f"{type(optimizer).__name__}, made outside. Move its construction under "
            "`with strategy.scope():`, or pass it to `compile` by name."
        )
    shards = model.distribute_strategy.extended.options.shards_optimizers
    callbacks = arguments.get("callbacks")
    for callback in getattr(callbacks, "callbacks", callbacks) or []:
        if shards and isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                "`SwapEMAWeights` must not be used with `sharding`, because each rank has the "
                "averages of its own part of the weights. Received: SwapEMAWeights in `callbacks`. "
                "Leave it out: `fit` ends with the averages, and `ema_overwrite_frequency` takes "
                "them during training."
            )
        if _is_horovods(callback):
            raise ValueError(
                "`callbacks` must not hold Horovod's own, because the strategy broadcasts the "
                "initial weights and computes metrics of the whole data. Received: "
                f"{type(callback).__name__}. Leave it out."
            )
    is_heard = collective.size > 1 and collective.topology.is_chief
    if optimizer is not None and is_heard and _is_called_with_horovod():
        _warn_of_multiplied_rate(optimizer, collective.size)


def _check_not_distributed(name: str, data: Any) -> None:
    of_tensorflow = (
        tf.distribute.DistributedDataset,
        tf.distribute.DistributedIterator,
        tf.distribute.DistributedValues,
    )
    for leaf in tf.nest.flatten(data):
        # Variables made in the scope are `DistributedValues` too, but are valid as data.
        if isinstance(leaf, of_tensorflow) and not isinstance(leaf, tf.Variable):
            raise ValueError(
                f"`{name}` must be arrays, a dataset of global batches, or what "
                f"`experimental_distribute_dataset` of the model's own strategy has made from one. "
                f"Received: {type(leaf).__name__}, made by `distribute_datasets_from_function`, by "
                f"another strategy, or by `iter`. Pass the dataset itself: the strategy "
                f"distributes it."
            )


def _is_horovods(thing: object) -> bool:
    return any(cls.__module__.split(".")[0] == "horovod" for cls in type(thing).__mro__)


def _is_called_with_horovod() -> bool:
    """Returns whether the code that calls `fit` has imported a module of Horovod, as `hvd`.

    The rate alone says nothing: 0.002 is as usual for Adam as 0.001 is.
    """
    frame = inspect.currentframe()
    while frame is not None and _package(frame.f_globals) in _BETWEEN:
        frame = frame.f_back
    names = {} if frame is None else {**frame.f_globals, **frame.f_locals}
    modules = [value for value in names.values() if isinstance(value, types.ModuleType)]
    return any(_package(vars(module)) == "horovod" for module in modules)


def _package(names: Mapping[str, Any]) -> str:
    """Returns the package of a module, from the module's names."""
    return str(names.get("__name__", "")).split(".")[0]


def _warn_of_multiplied_rate(optimizer: keras.Optimizer, size: int) -> None:
    """Warns if the learning rate is the optimizer's default times the number of processes."""
    rate = getattr(optimizer, "_learning_rate", None)
    parameter = inspect.signature(type(optimizer)).parameters.get("learning_rate")
    default = getattr(parameter, "default", None)
    if not isinstance(rate, keras.Variable) or not isinstance(default, float):
        return
    if math.isclose(float(rate.numpy()), default * size, rel_tol=1e-6):
        warnings.warn(
            f"The learning rate is {type(optimizer).__name__}'s default times the number of "
            f"processes ({default} × {size}). Batches are global here, so a batch size of B is B "
            f"rows for all {size} processes together, and the rate of one process is right for "
            f"it. Multiply the rate only if you multiplied the batch size.",
            stacklevel=2,
        )
