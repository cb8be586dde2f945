"""SGD's update if the compressor applies momentum, which the exchanged gradients then include."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdml.strategies.keras_seam.current import get_extended
from tfdml.strategies.keras_seam.replacing import Replacement


def _sgd_update_step(original: Callable) -> Callable:
    def update_step(self, gradient, variable, learning_rate):
        extended = get_extended(tf.distribute.get_strategy())
        if extended is None or not extended.compresses or not extended.compressor.replaces_momentum:
            return original(self, gradient, variable, learning_rate)
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, tf.cast(gradient, variable.dtype) * rate)

    return update_step


REPLACEMENTS: list[Replacement] = [(keras.optimizers.SGD, "update_step", _sgd_update_step)]
