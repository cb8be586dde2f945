"""Explicit order of a graph's operations."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def after_arguments(update: Callable) -> Callable:
    """Wraps a variable's update so that no part of it runs before its arguments are computed.

    Args:
        update: Function of the variable and the arguments.
    """

    def ordered(variable: tf.Variable, *values: Any, **options: Any) -> Any:
        flat = tf.nest.flatten(values, expand_composites=True)
        # Reads of variables are in order anyway.
        tensors = [v for v in flat if tf.is_tensor(v) and not isinstance(v, tf.Variable)]
        with tf.control_dependencies(tensors):
            return update(variable, *values, **options)

    return ordered
