"""Copies of optimizers, of which the variables are counted."""

import keras
import tensorflow as tf


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
