"""`tfdml.find_batch_size`: the largest global batch that fits in memory, agreed by all ranks."""

import dataclasses
import json
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import keras
import numpy as np
import psutil
import tensorflow as tf
from rich.console import Console

from tfdml.batch_size.bisection import largest_fitting
from tfdml.batch_size.trial import TrialOutcome, TrialSetting
from tfdml.batch_size.trial_process import TrialProcess
from tfdml.callbacks import GradientNoiseScale
from tfdml.collectives.texts import gather_texts
from tfdml.strategies.replica_strategy import ReplicaStrategy

# Rows that are sent to the trials' process, which repeats them.
_SAMPLE = 256


def find_batch_size(
    build_model: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    start: int = 32,
    limit: int | None = None,
    memory_limit: int | None = None,
    noise_scale: GradientNoiseScale | float | None = None,
    margin: float = 0.1,
) -> int:
    """Returns the largest global batch size that fits in memory on all ranks, to an eighth.

    Each rank trains a few steps on its share of a batch, in a process of its own, so that running
    out of memory ends that process and never the rank. A batch that does not fit on one rank does
    not fit. Rows are doubled while they fit, then bisected. All ranks call this.

    ```python
    batch_size = tfdml.find_batch_size(build_model, (x, y), strategy)
    ```

    Args:
        build_model: Function that returns a new compiled model. It is copied to the other process,
            so it must not use the strategy: it is called in a scope.
        data: Arrays of training data as a tuple `(x, y)` or `(x, y, sample_weight)`, whose rows are
            repeated as needed; or a function that makes such a batch of a number of rows.
        strategy: Synchronous strategy of tfdml for which the batch is.
        start: Global batch size to try first.
        limit: Largest global batch size to try; by default the number of rows in `data`.
        memory_limit: Bytes that training may take on each rank, or on each of its GPUs, above a
            process that has imported TensorFlow. By default all of a GPU; without GPUs an equal
            part for each rank of the host's memory that is free now.
        noise_scale: Largest batch size that pays: a `GradientNoiseScale` that has been used in
            `fit`, or a number of rows. Larger batches are not tried.
        margin: Part of the rows by which a trial has more than the batch that it stands for, for
            what trials do not see, such as validation data and fragmented memory.

    Returns:
        Rows of a global batch, the same on all ranks.

    Raises:
        ValueError: If an argument is wrong, the strategy divides what trials cannot, or a model
            cannot be sent to another process.
        MemoryError: If not even a row for each replica fits.
        RuntimeError: If a trial fails for another reason than memory, on any rank.
    """
    _check_strategy(strategy)
    sample, limit = _checked_data(data, limit)
    limit = _capped(limit, noise_scale)
    _check_numbers(start=start, limit=limit, memory_limit=memory_limit, margin=margin)
    extended = strategy.extended
    program = _pickled(build_model, sample)
    setting = _setting(strategy, program, memory_limit)
    least = min(strategy.num_replicas_in_sync, limit)
    with extended.collective_call("find_batch_size"), TrialProcess(setting) as process:

        def fits(rows: int) -> bool:
            own = process.run(_own_rows(strategy, math.ceil(rows * (1 + margin))))
            return _agreed(strategy, rows, own)

        found = largest_fitting(fits, start, least, limit)
    if not found:
        raise MemoryError(
            f"A batch of {least} rows, one for each replica, must fit in memory. Received: a model "
            f"for which it does not (memory_limit={memory_limit}). Make the model smaller, or see "
            f"what takes its memory: `tfdml.estimate_memory`."
        )
    if strategy.is_chief:
        Console(highlight=False).print(_summary(found, limit, noise_scale))
    return found


def _check_strategy(strategy: tf.distribute.Strategy) -> None:
    if not isinstance(strategy, ReplicaStrategy):
        raise ValueError(
            f"`strategy` must be a synchronous strategy of tfdml, whose ranks hold the whole "
            f"model. Received: strategy={strategy!r}. On parameter servers, the batch of a worker "
            f"is that of a process: use `tfdml.MirroredStrategy()` on a worker's machine."
        )
    options = strategy.extended.options
    divided = {name: getattr(options, name) for name in ("sharding", "pipeline", "local_updates")}
    given = {name: value for name, value in divided.items() if value is not None}
    if given:
        raise ValueError(
            f"`strategy` must not have `sharding`, `pipeline` or `local_updates`, because a trial "
            f"runs without the other ranks and stages, and so takes other memory. Received: "
            f"{given}. Use `tfdml.estimate_memory`, or `plan` of a pipeline."
        )


def _checked_data(data: Any, limit: int | None) -> tuple[Any, int]:
    """Returns a function that makes batches, or a sample of rows; and the largest batch."""
    if callable(data):
        if limit is None:
            raise ValueError(
                "`limit` must be given if `data` is a function, which can make any number of "
                "rows. Received: limit=None. Pass the number of training rows."
            )
        return data, limit
    if not isinstance(data, tuple) or not 2 <= len(data) <= 3:
        raise ValueError(
            f"`data` must be a tuple (x, y) or (x, y, sample_weight) of arrays, or a function of a "
            f"number of rows. Received: data of type {type(data).__name__}. Of a dataset, pass "
            f"`next(iter(dataset))` and `limit`."
        )
    arrays = tf.nest.map_structure(np.asarray, data)
    counts = {len(a) if a.ndim else 0 for a in tf.nest.flatten(arrays)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"`data` must have the same number of rows in all arrays, and at least one. Received: "
            f"arrays of {sorted(counts)} rows. Cut them alike."
        )
    sample = tf.nest.map_structure(lambda a: a[:_SAMPLE].copy(), arrays)
    return sample, counts.pop() if limit is None else limit


def _capped(limit: int, noise_scale: GradientNoiseScale | float | None) -> int:
    if noise_scale is None:
        return limit
    is_callback = isinstance(noise_scale, GradientNoiseScale)
    pays = noise_scale.suggested_batch_size() if is_callback else noise_scale
    if isinstance(pays, bool) or not isinstance(pays, int | float) or not 1 <= pays < math.inf:
        raise ValueError(
            f"`noise_scale` must be a number of rows from 1, or a `GradientNoiseScale` that has an "
            f"estimate. Received: noise_scale={noise_scale!r}, of which the batch is {pays}. Use "
            f"the callback in a `fit` on two replicas or more first."
        )
    return min(limit, int(pays))


def _check_numbers(start: int, limit: int, memory_limit: int | None, margin: float) -> None:
    for name, value in {"start": start, "limit": limit, "memory_limit": memory_limit}.items():
        is_none = value is None and name == "memory_limit"
        if not is_none and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(
                f"`{name}` must be a positive integer. Received: {name}={value!r}. Pass a number "
                f"of {'bytes' if name == 'memory_limit' else 'rows'}."
            )
    if not 0 <= margin < 1:
        raise ValueError(
            f"`margin` must be from 0 to below 1. Received: margin={margin!r}. Use 0.1 for trials "
            f"of a tenth more rows."
        )


def _pickled(build_model: Callable[[], keras.Model], data: Any) -> bytes:
    try:
        return cloudpickle.dumps((build_model, data))
    except (TypeError, pickle.PicklingError, NotImplementedError) as error:
        raise ValueError(
            f"`build_model` and `data` must be such that another process can have a copy. "
            f"Received: build_model={build_model!r} ({error}). Functions must not use a strategy, "
            f"a model or tensors of this process, also not by global variables; make them inside."
        ) from error


def _setting(strategy: ReplicaStrategy, program: bytes, memory_limit: int | None) -> TrialSetting:
    extended = strategy.extended
    gpus = tuple(gpu.name for gpu in tf.config.get_visible_devices("GPU"))
    if memory_limit is None and not gpus:
        on_host = len(extended.aggregator_choice.hosts.local_ranks(strategy.rank))
        memory_limit = psutil.virtual_memory().available // on_host
    devices = [device.rsplit("/device:", 1)[-1] for device in extended.local_devices]
    return TrialSetting(
        program=program,
        path=tuple(sys.path),
        cpus=len(tf.config.list_logical_devices("CPU")),
        gpus=gpus,
        devices=tuple(devices),
        policy=keras.config.dtype_policy().name,
        floatx=keras.config.floatx(),
        # Sums that have not arrived; what compression has left out.
        gradient_copies=0 if strategy.size == 1 else 1 + extended.compresses,
        memory_limit=memory_limit,
    )


def _own_rows(strategy: ReplicaStrategy, batch_size: int) -> int:
    """Returns the rows of a batch that this process gets, if each replica gets as many as most."""
    replicas = strategy.num_replicas_in_sync
    weights: Sequence[int] = strategy.batch_weights or [1] * replicas
    most = math.ceil(batch_size * max(weights) / sum(weights))
    return most * strategy.extended.num_local_replicas


def _agreed(strategy: ReplicaStrategy, rows: int, own: TrialOutcome) -> bool:
    """Returns whether a batch fits on all ranks; raises an error of any of them on all."""
    text = json.dumps(dataclasses.asdict(own))
    texts = gather_texts(strategy.extended.collective, text, "find_batch_size")
    outcomes = [TrialOutcome(**json.loads(text)) for text in texts]
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise RuntimeError(
                f"A trial of a batch of {rows} rows has failed on rank {rank}, not for lack of "
                f"memory:\n{outcome.error}"
            )
    return all(outcome.fits for outcome in outcomes)


def _summary(found: int, limit: int, noise_scale: GradientNoiseScale | float | None) -> str:
    if found < limit:
        return f"Batch size: {found:,} rows fit in memory."
    why = "larger batches were not tried" if noise_scale is None else "larger ones pay less"
    return f"Batch size: {found:,} rows fit in memory; {why}."
