"""Refusal of `keras.distribution`, which Keras ignores on TensorFlow without a word."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.distribution import distribution_lib

from tfdml.strategies.keras_seam.current import is_tfdml_strategy
from tfdml.strategies.keras_seam.replacing import Replacement


def check_no_distribution(received: Any) -> None:
    """Refuses a distribution of Keras's in a program that trains under one of our strategies.

    Args:
        received: The distribution; None for none.

    Raises:
        ValueError: If there is one.
    """
    if received is None:
        return
    raise ValueError(
        f"`keras.distribution.set_distribution` must not be called for a model of a tfdml "
        f"strategy, because on TensorFlow Keras does not divide anything by it. Received: "
        f"{type(received).__name__}. Data are divided by the strategy itself, optimizer state by "
        f"`sharding=tfdml.Sharding(optimizer_state=True)`; `tfdml.remat` saves activations."
    )


def _set_distribution(original: Callable) -> Callable:
    def set_distribution(value):
        if is_tfdml_strategy(tf.distribute.get_strategy()):
            check_no_distribution(value)
        return original(value)

    return set_distribution


REPLACEMENTS: list[Replacement] = [
    (distribution_lib, "set_distribution", _set_distribution),
    (keras.distribution, "set_distribution", _set_distribution),
]
