"""Updates of SGD and Adam that read and write each number once.

Keras computes an update from a dozen operations, and each reads and writes all numbers of a
variable. One operation for all of it gives the same bits, and takes a third of the time.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.native import library
from tfdml.strategies.keras_seam.current import get_extended
from tfdml.strategies.keras_seam.replacing import Replacement

_DTYPES = (tf.float32, tf.float64)


def update_sgd(
    original: Callable,
    optimizer: keras.optimizers.SGD,
    gradient: Any,
    variable: tf.Variable,
    learning_rate: tf.Tensor,
) -> None:
    """Makes SGD's update of a variable.

    Args:
        original: Keras's `update_step`, for what has no such operation.
        optimizer: The optimizer.
        gradient: The variable's gradient, dense or sparse.
        variable: The variable, on the device of its update.
        learning_rate: The step's learning rate.
    """
    dtype = variable.dtype
    if dtype not in _DTYPES or not is_of_replicas(gradient, variable):
        original(optimizer, gradient, variable, learning_rate)
        return
    rate, gradient = tf.cast(learning_rate, dtype), tf.cast(gradient, dtype)
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient, use_locking=True
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=_slot(optimizer, optimizer.momentums, variable),
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, dtype),
        use_locking=True,
        use_nesterov=optimizer.nesterov,
    )


def _adam_update_step(original: Callable) -> Callable:
    def update_step(self, gradient, variable, learning_rate):
        operations = library.usable()
        usable = operations is not None and variable.dtype == tf.float32 and not self.amsgrad
        if not usable or not is_of_replicas(gradient, variable):
            original(self, gradient, variable, learning_rate)
            return
        # As in Keras.
        step = tf.cast(self.iterations + 1, tf.float32)
        one = tf.pow(tf.constant(self.beta_1, tf.float32), step)
        two = tf.pow(tf.constant(self.beta_2, tf.float32), step)
        rate = tf.cast(learning_rate, tf.float32) * tf.sqrt(1 - two) / (1 - one)
        operations.tfdml_adam(
            weight=variable.handle,
            first_moment=_slot(self, self._momentums, variable),
            second_moment=_slot(self, self._velocities, variable),
            gradient=tf.cast(gradient, tf.float32),
            rate=rate,
            first_rate=1 - self.beta_1,
            second_rate=1 - self.beta_2,
            epsilon=self.epsilon,
        )

    return update_step


def _slot(optimizer: keras.Optimizer, slots: list, variable: tf.Variable) -> tf.Tensor:
    """Returns the handle of a variable's slot on the device of the update."""
    return slots[optimizer._get_variable_index(variable)]._value.handle


def is_of_replicas(gradient: Any, variable: tf.Variable) -> bool:
    """Returns whether it is the update of a whole gradient by a replica of several.

    XLA, which has no such operations, compiles none of their updates, also not in local steps.
    """
    extended = get_extended(tf.distribute.get_strategy())
    several = extended is not None and extended.works_on_shares
    return several and isinstance(gradient, tf.Tensor) and hasattr(variable, "handle")


REPLACEMENTS: list[Replacement] = [(keras.optimizers.Adam, "update_step", _adam_update_step)]
