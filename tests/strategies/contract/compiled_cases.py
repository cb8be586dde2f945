"""Cases run by ranks: steps compiled by XLA with `jit_compile=True`."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import CLASSES, InScope, compiled, data, fitted, outcome


def by_xla(case: Callable, *args: Any) -> Any:
    """Runs a case with all models compiled by XLA."""
    with mock.patch.object(keras.Model, "_resolve_auto_jit_compile", return_value=True):
        return case(*args)


class OnTheHost(layers.Layer):
    """Layer that XLA cannot compile."""

    def call(self, inputs):
        """Returns its inputs."""
        out = tf.py_function(lambda x: x, [inputs], inputs.dtype)
        return tf.ensure_shape(out, inputs.shape)


def methods_compiled_by_xla() -> list[str]:
    """Returns the methods that fail because of a layer that XLA cannot compile."""
    x, y = data(12)
    found = []
    for jit in (False, True):
        with rank_job.strategy().scope():
            inputs = layers.Input((6,))
            outputs = layers.Dense(CLASSES)(OnTheHost()(inputs))
            model = keras.Model(inputs, outputs)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, jit_compile=jit)
        calls = {
            "train": lambda m=model: m.train_on_batch(x, y),
            "test": lambda m=model: m.test_on_batch(x, y),
            "predict": lambda m=model: m.predict(x, verbose=0),
        }
        for name, call in calls.items():
            try:
                call()
            except tf.errors.InvalidArgumentError as error:
                found.append(f"{name}, {jit}: {'unsupported operations' in str(error)}")
    return found


def compressed(name: str) -> dict:
    """Trains with compressed gradients."""
    x, y = data(49)
    made = InScope(keras.optimizers.SGD, 0.05)
    return fitted(
        compiled(rank_job.strategy(compression=name), optimizer=made, jit_compile=True), x, y
    )


class Twice(keras.optimizers.SGD):
    """Optimizer that updates by twice the gradients."""

    def apply(self, grads, trainable_variables=None):
        """Applies doubled gradients."""
        super().apply([2.0 * g for g in grads], trainable_variables)


def own_apply() -> dict:
    """Trains with an optimizer that has a custom `apply`."""
    x, y = data(50)
    model = compiled(rank_job.strategy(), optimizer=InScope(Twice, 0.02), jit_compile=True)
    return fitted(model, x, y)


def gathered(steps: int) -> dict:
    """Trains with gradients of several steps, exchanged once."""
    x, y = data(50)
    made = InScope(keras.optimizers.SGD, 0.05, gradient_accumulation_steps=steps)
    model = compiled(rank_job.strategy(), optimizer=made, jit_compile=True)
    return fitted(model, x, y, rows=8)


def scaled() -> dict:
    """Trains with `mixed_float16`: the loss scale's optimizer makes the update."""
    x, y = data(48)
    keras.config.set_dtype_policy("mixed_float16")
    made = InScope(keras.optimizers.SGD, 0.05)
    model = compiled(rank_job.strategy(), optimizer=made, jit_compile=True)
    result = outcome(model, model.fit(x, y, batch_size=12, epochs=2, verbose=0))
    result["updates"] = np.array(model.optimizer.inner_optimizer.iterations)
    return result
