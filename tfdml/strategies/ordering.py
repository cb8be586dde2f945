"""The order of a graph's operations, where TensorFlow would choose another one."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def after_arguments(update: Callable) -> Callable:
    """Returns a variable's update of which nothing runs before its arguments are there.

    Args:
        update: Is given the variable and the arguments.
    """

    def ordered(variable: tf.Variable, *values: Any, **options: Any) -> Any:
        flat = tf.nest.flatten(values, expand_composites=True)
        with tf.control_dependencies([v for v in flat if tf.is_tensor(v)]):
            return update(variable, *values, **options)

    return ordered
