"""Functions that are traced and never run, so that nothing is allocated."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


class _Abandoned(Exception):
    """Ends a trace before its variables get values."""


def traced_only(function: Callable[..., Any], *specs: Any) -> Any:
    """Calls a function in a graph that never runs; returns what it returns.

    Variables that it creates have no values: `tf.function` gives the variables of its first trace
    their values after the trace, which is abandoned here.

    Args:
        function: The function.
        specs: Structures of `tf.TensorSpec`, in place of its arguments.
    """
    found = []

    def abandoned(*arguments: Any) -> None:
        found.append(function(*arguments))
        raise _Abandoned

    with contextlib.suppress(_Abandoned):
        tf.function(abandoned, autograph=False).get_concrete_function(*specs)
    return found[0]


def unbuilt_copy(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns an unbuilt optimizer with the same arguments.

    Raises:
        ValueError: If it cannot be made from the optimizer's config.
    """
    try:
        with tf.init_scope():
            return type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"An optimizer must be what `from_config` makes of its `get_config`. Received: "
            f"{type(optimizer).__name__}, with which that failed: {error} Implement both."
        ) from error
