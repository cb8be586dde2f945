"""Checks of a `ParameterServerStrategy` before a step, and the error for a lost server."""

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdml.aggregation import CoordinateRule, RobustRule
from tfdml.runtime.servers.server_task import SERVER, name_of
from tfdml.strategies.parameter_server.partition import is_partitioned
from tfdml.strategies.parameter_server.remote_datasets import HOW_TO_READ


class ServerLostError(RuntimeError):
    """Error raised if a parameter server is lost, together with its variables."""


def check_arguments(
    synchronous: bool,
    backup_workers: int,
    max_staleness: int | None,
    partitioner: Any,
    batch_split: Any,
) -> None:
    """Checks the constructor's arguments that do not depend on the cluster.

    Raises:
        ValueError: If an argument is wrong.
    """
    if not isinstance(backup_workers, int) or backup_workers < 0:
        raise ValueError(
            f"`backup_workers` must be a number of workers. Received: "
            f"backup_workers={backup_workers!r}."
        )
    if backup_workers and not synchronous:
        raise ValueError(
            f"`backup_workers` must be 0 without `synchronous=True`, because no worker waits for "
            f"another. Received: backup_workers={backup_workers}."
        )
    if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
        raise ValueError(
            f"`max_staleness` must be a number of updates, or None for no bound. Received: "
            f"max_staleness={max_staleness!r}."
        )
    if max_staleness is not None and synchronous:
        raise ValueError(
            f"`max_staleness` must be None with `synchronous=True`, where it is 0. Received: "
            f"max_staleness={max_staleness}."
        )
    if batch_split is not None and not synchronous:
        raise ValueError(
            f"`batch_split` must be None without `synchronous=True`, because each worker takes "
            f"whole batches at its own pace: a faster one takes more of them. Received: "
            f"batch_split={batch_split!r}. Leave it out, or train with `synchronous=True`."
        )
    if isinstance(batch_split, str) and backup_workers:
        raise ValueError(
            f"`batch_split` must be numbers or None with `backup_workers`, because nobody waits "
            f"for the slowest worker, so its time is not known. Received: "
            f"batch_split={batch_split!r}, backup_workers={backup_workers}. Leave one of them out."
        )
    if partitioner is not None and not callable(partitioner):
        raise ValueError(
            f"`variable_partitioner` must be a function of `shape` and `dtype`, such as "
            f"`tf.distribute.experimental.partitioners.MinSizePartitioner(...)`. Received: "
            f"variable_partitioner={partitioner!r}."
        )


def check_gradient_aggregation(synchronous: bool, rule: RobustRule | None) -> None:
    """Checks the rule that combines the workers' gradients.

    Raises:
        ValueError: If the chief cannot use it.
    """
    if rule is None:
        return
    if not synchronous:
        raise ValueError(
            f"`gradient_aggregation` must be None without `synchronous=True`, because each worker "
            f"applies its own gradients. Received: gradient_aggregation={rule!r}. Leave it out, or "
            f"train with `synchronous=True`."
        )
    if not isinstance(rule, CoordinateRule):
        raise ValueError(
            f"`gradient_aggregation` must keep nothing from step to step, because workers may be "
            f"lost, and their shares go to others. Received: gradient_aggregation={rule!r}. Use "
            f"`tfdml.aggregation.TrimmedMean`, or another strategy."
        )


def check_call(model: keras.Model, call: str, arguments: Mapping[str, Any]) -> None:
    """Refuses a call of `fit`, `evaluate` or `predict`, before it has an effect.

    Args:
        model: The model.
        call: The method's name.
        arguments: Its arguments by name.

    Raises:
        ValueError: If the workers cannot run the call.
    """
    check_model(model)
    strategy, x = model.distribute_strategy, arguments.get("x")
    if call != "fit" or strategy.synchronous:
        return
    if inspect.isgenerator(x) or isinstance(x, keras.utils.PyDataset) or _is_torch_loader(x):
        raise ValueError(
            f"`x` must be a `tf.data.Dataset`, a function that makes one, or arrays, because the "
            f"workers read the data for themselves and Python runs only on the chief. Received: "
            f"{type(x).__name__}. {HOW_TO_READ}"
        )
    is_data = callable(x) or isinstance(x, tf.data.Dataset)
    if is_data and not arguments.get("steps_per_epoch"):
        raise ValueError(
            "`steps_per_epoch` must be given, because the workers read the data for themselves and "
            "none of them knows when all have been read. Received: steps_per_epoch="
            f"{arguments.get('steps_per_epoch')!r}. Pass the number of batches of an epoch."
        )


def check_model(model: keras.Model) -> None:
    """Refuses a model that workers cannot train.

    Raises:
        ValueError: If its step runs eagerly or is compiled by XLA; if its optimizer was made
            outside the scope, or accumulates gradients in asynchronous training; or if a layer is
            synchronized in synchronous training.
    """
    if model.run_eagerly:
        raise ValueError(
            "`run_eagerly` must be False, because workers run graphs and no Python. Received: "
            "run_eagerly=True."
        )
    if getattr(model, "jit_compile", False) is True:
        raise ValueError(
            "`jit_compile` must not be True, because XLA cannot read variables from servers inside "
            "a compiled step. Received: jit_compile=True. Leave it out of `compile`."
        )
    if model.distribute_strategy.synchronous:
        for layer in model._flatten_layers():
            if getattr(layer, "synchronized", False):
                raise ValueError(
                    f"`synchronized` must be False, because workers do not exchange anything in "
                    f"the middle of a step. Received: synchronized=True in {layer.name!r}. Leave "
                    f"it out, or use another strategy."
                )
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulates = getattr(inner, "gradient_accumulation_steps", None)
    if accumulates and not model.distribute_strategy.synchronous:
        raise ValueError(
            f"`gradient_accumulation_steps` must be None in asynchronous training, because workers "
            f"would add to one sum at different times. Received: {accumulates}. Use larger "
            f"batches, or `synchronous=True`."
        )
    if optimizer is not None and not _made_in(optimizer, model.distribute_strategy):
        raise ValueError(
            f"`optimizer` must be made in the strategy's scope, like the model. Received: "
            f"{type(optimizer).__name__}, made outside. Move its construction under "
            f"`with strategy.scope():`, or pass it to `compile` by name."
        )


def check_partitions(model: keras.Model) -> None:
    """Warns if the partitioner splits nothing, and refuses constraints on split variables.

    Raises:
        ValueError: If a split variable has a constraint.
    """
    partitioner = model.distribute_strategy.extended.partitioner
    if partitioner is None:
        return
    weights = [v for layer in model._flatten_layers() for v in layer._trainable_variables]
    split = [v for v in weights if is_partitioned(v)]
    if weights and not split:
        largest = max(weights, key=lambda v: math.prod(v.shape))
        warnings.warn(
            f"`variable_partitioner` splits no variable of this model. Received: "
            f"{type(partitioner).__name__}, which leaves all whole; the largest is {largest.path} "
            f"of shape {tuple(largest.shape)}. Lower its smallest or largest part "
            f"size if that is not intended.",
            stacklevel=2,
        )
    constrained = [v.path for v in split if v.constraint is not None]
    if constrained:
        raise ValueError(
            f"A partitioned variable must have no constraint, because a constraint needs the whole "
            f"variable, which no server has. Received: a constraint of {constrained[0]}. Leave it "
            f"out, or let `variable_partitioner` return 1 for this variable."
        )


def explain_loss(strategy: tf.distribute.Strategy, call: str, error: Exception) -> None:
    """Raises an error that names the lost server, if a lost server caused the given error.

    Raises:
        ServerLostError: If a server is lost.
    """
    link = strategy.connection.link
    broken = isinstance(error, tf.errors.OpError)
    lost = link.wait_for_loss(SERVER) if broken else link.lost_indices(SERVER)
    if lost:
        names = ", ".join(
            f"{name_of(SERVER, i)} ({strategy.connection.task.cluster[SERVER][i]})" for i in lost
        )
        raise ServerLostError(
            f"`{call}` cannot continue, because {names} is lost, and the variables there with it: "
            f"{link.lost[SERVER, lost[0]]}. Start the job again; it continues from the "
            f"last file that was saved."
        ) from error


def _made_in(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> bool:
    return getattr(optimizer, "_distribution_strategy", strategy) is strategy


def _is_torch_loader(x: Any) -> bool:
    return any(c.__module__.split(".")[0] == "torch" for c in type(x).__mro__)
