"""Steps that XLA compiles, by `jit_compile=True` where other files' cases say nothing."""

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
    """Runs a case whose models XLA compiles."""
    with mock.patch.object(keras.Model, "_resolve_auto_jit_compile", return_value=True):
        return case(*args)


class OnTheHost(layers.Layer):
    """A layer that XLA cannot compile."""

    def call(self, inputs):
        """Returns its inputs."""
        out = tf.py_function(lambda x: x, [inputs], inputs.dtype)
        return tf.ensure_shape(out, inputs.shape)


def what_xla_compiles() -> list[str]:
    """The methods that fail with a layer that XLA cannot compile, alone for that."""
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
    """A training whose gradients are compressed."""
    x, y = data(49)
    made = InScope(keras.optimizers.SGD, 0.05)
    return fitted(
        compiled(rank_job.strategy(compression=name), optimizer=made, jit_compile=True), x, y
    )


class Twice(keras.optimizers.SGD):
    """Makes an update by twice the gradients."""

    def apply(self, grads, trainable_variables=None):
        """Applies them."""
        super().apply([2.0 * g for g in grads], trainable_variables)


def own_apply() -> dict:
    """An optimizer with an `apply` of its own."""
    x, y = data(50)
    model = compiled(rank_job.strategy(), optimizer=InScope(Twice, 0.02), jit_compile=True)
    return fitted(model, x, y)


def gathered(steps: int) -> dict:
    """Gradients of several steps, exchanged once."""
    x, y = data(50)
    made = InScope(keras.optimizers.SGD, 0.05, gradient_accumulation_steps=steps)
    model = compiled(rank_job.strategy(), optimizer=made, jit_compile=True)
    return fitted(model, x, y, rows=8)


def scaled() -> dict:
    """`mixed_float16`: the update is in the loss scale's optimizer."""
    x, y = data(48)
    keras.config.set_dtype_policy("mixed_float16")
    made = InScope(keras.optimizers.SGD, 0.05)
    model = compiled(rank_job.strategy(), optimizer=made, jit_compile=True)
    result = outcome(model, model.fit(x, y, batch_size=12, epochs=2, verbose=0))
    result["updates"] = np.array(model.optimizer.inner_optimizer.iterations)
    return result
