"""SGD's update where a compressor changes it.

Some compressors apply momentum themselves, so the exchanged gradients include it. With others the
momentum of a number waits until that number is sent: else a step would go on in the direction of
numbers that were sent before, against gradients that are known but not sent yet.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdml.compression.compressor import Compressor
from tfdml.compression.exchange.step_state import can_be_compressed
from tfdml.strategies.keras_seam.current import get_extended
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.one_pass_updates import update_sgd
from tfdml.strategies.sharded.variable_parts import is_dealt


def _sgd_update_step(original: Callable) -> Callable:
    def update_step(self, gradient, variable, learning_rate):
        compressor = None if _is_table(self, variable) else _compressor_in_use()
        if compressor is not None and compressor.replaces_momentum:
            rate = tf.cast(learning_rate, variable.dtype)
            self.assign_sub(variable, tf.cast(gradient, variable.dtype) * rate)
        elif compressor is not None and _waits(compressor, self, gradient, variable):
            moved = (variable, self.momentums[self._get_variable_index(variable)])
            before = [tf.identity(each) for each in moved]
            update_sgd(original, self, gradient, variable, learning_rate)
            for each, old in zip(moved, before, strict=True):
                self.assign(each, tf.where(tf.not_equal(gradient, 0), each, old))
        else:
            update_sgd(original, self, gradient, variable, learning_rate)

    return update_step


def _is_table(optimizer: keras.optimizers.SGD, variable: tf.Variable) -> bool:
    """Returns whether a variable is a table dealt to the ranks: its gradient is not compressed."""
    return is_dealt(optimizer._trainable_variables[optimizer._get_variable_index(variable)])


def _compressor_in_use() -> Compressor | None:
    extended = get_extended(tf.distribute.get_strategy())
    return extended.compressor if extended is not None and extended.compresses else None


def _waits(
    compressor: Compressor,
    optimizer: keras.optimizers.SGD,
    gradient: tf.Tensor,
    variable: keras.Variable,
) -> bool:
    """Returns whether only those numbers of a variable move that were sent."""
    waits = compressor.momentum_waits and optimizer.momentum != 0
    return waits and can_be_compressed(gradient, compressor)


REPLACEMENTS: list[Replacement] = [(keras.optimizers.SGD, "update_step", _sgd_update_step)]
