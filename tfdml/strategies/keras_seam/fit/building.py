"""Creation of a model's variables before its first step, where Keras does not or cannot."""

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import compute_output_spec


def is_called_by_own_steps(model: keras.Model) -> bool:
    """Returns whether a model has no `call`, so that its own steps call its parts, as in GANs."""
    return type(model).call is keras.Model.call


def build_optimizer(model: keras.Model) -> None:
    """Builds the optimizer of a model without a `call`, which Keras refuses to build.

    If parts are not built yet, their first call builds them, and the first update the optimizer.
    """
    parts = model._flatten_layers(include_self=False)
    if all(part.built for part in parts) and not getattr(model.optimizer, "built", True):
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def build_for_predict(model: keras.Model, batch: Any) -> None:
    """Creates a model's variables, which XLA cannot; Keras builds only for `fit` and `evaluate`.

    A pipeline needs them before its first step, to put them on their devices.

    Args:
        model: The model.
        batch: A batch of the first step.
    """
    if all(layer.built for layer in model._flatten_layers()):
        return
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    specs = tf.nest.map_structure(
        lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype.name), inputs
    )
    with model.distribute_strategy.scope():
        compute_output_spec(model, specs, training=False)
