"""Removal of differences between runs that are no errors, and rounding on purpose.

Runs of a script start from the same weights, even if its initializers have no seed. Keras's random
numbers in a step, such as the masks of `Dropout`, are drawn for each row by itself: their streams
belong to replicas in training, and would not be comparable. Layers of mixed precision compute in
the dtype of their variables: a sum of many float16 or bfloat16 numbers is off by some per cent, and
by others if replicas add up parts of it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random
from keras.src.random.seed_generator import draw_seed

from tfdml.strategies.arguments import ReplicaOptions
from tfdml.strategies.keras_seam.recording.recorder import Recorder
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.replicas.replica_step import metric_variables
from tfdml.verification.request import Request

_LEFT_OUT = ("local_updates", "gradient_aggregation", "sharding")
# Dtypes of layers in mixed precision.
_SHORT = ("float16", "bfloat16")


def left_out(options: ReplicaOptions, compresses: bool) -> tuple[ReplicaOptions, list[str]]:
    """Returns options with synchronous sums for whole variables, and what was left out, in words.

    Args:
        options: The script's options.
        compresses: Whether to leave compression in.
    """
    names = _LEFT_OUT if compresses else (*_LEFT_OUT, "compression")
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    changes: dict[str, Any] = dict.fromkeys(given)
    if options.batch_split == "auto":
        changes["batch_split"] = None
    return dataclasses.replace(options, **changes), [f"{n}={v!r}" for n, v in given.items()]


def left_out_of_model(model: keras.Model) -> list[str]:
    """Returns what is left out of a model's layers, in words."""
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    return [f"rounding of {name}" for name in sorted(policies) if name.startswith("mixed_")]


def start_alike(model: keras.Model, request: Request, rank: int) -> None:
    """Starts from the first run's weights and seeds; the first run writes them.

    Args:
        model: The built model.
        request: The request.
        rank: This process's rank.
    """
    metrics = {id(v) for v in metric_variables(model)}
    variables = [v for v in model.variables if id(v) not in metrics]
    if not request.initial.exists():
        if rank == 0:
            values = {str(i): keras.ops.convert_to_numpy(v) for i, v in enumerate(variables)}
            np.savez(request.initial, **values)
        return
    trained = {id(v) for v in model.trainable_variables}
    with np.load(request.initial) as initial, model.distribute_strategy.scope():
        for i, variable in enumerate(variables):
            # A model of another shape is a difference that the comparison finds.
            if str(i) not in initial or initial[str(i)].shape != tuple(variable.shape):
                continue
            value = initial[str(i)]
            if request.perturbs and id(variable) in trained:
                value = _rounded_anew(value, np.random.default_rng(i))
            variable.assign(value)


def with_rounding(data: Any, recorder: Recorder) -> Any:
    """Returns a batch with the numbers of its inputs changed in the last place, if asked for.

    Args:
        data: A replica's batch: inputs, or a tuple of inputs, targets and weights.
        recorder: The recorder.
    """
    request = recorder.request
    if not request.perturbs:
        return data
    generator = np.random.default_rng(recorder.step)

    def change(tensor: Any) -> Any:
        is_dense = isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating
        if not is_dense or tensor.dtype.size < 4:
            return tensor
        if request.float64:
            tensor = tf.cast(tensor, tf.float64)
        return tf.constant(_rounded_anew(np.asarray(tensor), generator))

    if isinstance(data, tuple):
        return (tf.nest.map_structure(change, data[0]), *data[1:])
    return tf.nest.map_structure(change, data)


def _rounded_anew(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns numbers changed by one unit in the last place, up or down."""
    if values.dtype not in (np.float32, np.float64):
        return values
    towards = np.where(generator.integers(0, 2, values.shape) > 0, np.inf, -np.inf)
    return np.where(values == 0, values, np.nextafter(values, towards.astype(values.dtype)))


def replacements(recorder: Recorder) -> list[Replacement]:
    """Returns replacements of Keras's functions by which runs differ without being wrong.

    Args:
        recorder: Recorder that knows the rows of the calling replica.
    """
    names = ("uniform", "normal", "truncated_normal", "randint", "dropout")
    by_rows = [(keras_random, name, functools.partial(_by_rows, recorder)) for name in names]
    return [*by_rows, (keras.DTypePolicy, "compute_dtype", _in_variables_dtype)]


def _in_variables_dtype(original: Callable) -> Callable:
    def compute_dtype(self) -> str:
        return self.variable_dtype if original(self) in _SHORT else original(self)

    return compute_dtype


def _by_rows(recorder: Recorder, original: Callable) -> Callable:
    signature = inspect.signature(original)

    def draw(*args: Any, **kwargs: Any) -> Any:
        replica, bound = recorder.replica, signature.bind(*args, **kwargs)
        given = bound.arguments
        # `dropout` has inputs, the other functions have a shape.
        inputs, shape = given.get("inputs"), given.get("shape", given.get("noise_shape"))
        shape = tuple(inputs.shape) if shape is None else tuple(shape)
        if replica is None or not shape or shape[0] not in (replica.rows, None):
            return original(*args, **kwargs)
        first, second = np.asarray(draw_seed(given.pop("seed", None))).tolist()
        of_row = {name: value for name, value in given.items() if name not in ("inputs", "shape")}
        if "noise_shape" in of_row or inputs is None:
            of_row["shape" if inputs is None else "noise_shape"] = (1, *shape[1:])
        drawn = []
        for row, digest in enumerate(replica.digests.tolist()):
            if inputs is not None:
                of_row["inputs"] = inputs[row : row + 1]
            seed = np.random.SeedSequence([abs(first), abs(second), digest]).generate_state(1)[0]
            drawn.append(original(**of_row, seed=int(seed >> 1)))
        return tf.concat(drawn, 0)

    return draw
