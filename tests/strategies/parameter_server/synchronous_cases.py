"""Cases run by a chief with `synchronous=True`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import CLASSES, InScope, compiled, data, outcome
from tests.strategies.parameter_server.cases import CountedMean
from tfdml.strategies import ParameterServerStrategy


def workers_of_each_step() -> list[list[int]]:
    """Returns the workers that took part in each step."""
    model = compiled(ParameterServerStrategy(synchronous=True))
    x, y = data(32)
    seen: list[list[int]] = []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda b, logs: seen.append(sorted(model.train_function.workers))
    )
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[each])
    return seen


class Masks(layers.Layer):
    """Layer that adds a random number, and reports it."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)

    def call(self, inputs):
        noise = keras.random.uniform((1,), seed=self.seed)
        return inputs + 0.0 * noise, tf.broadcast_to(noise, [tf.shape(inputs)[0], 1])


def stateful() -> dict:
    """A model whose layers keep statistics and draw random numbers."""
    strategy = ParameterServerStrategy(synchronous=True)
    with strategy.scope():
        inputs = layers.Input((6,))
        hidden, noise = Masks()(inputs)
        hidden = layers.BatchNormalization()(layers.Dense(8)(hidden))
        model = keras.Model(inputs, [layers.Dense(CLASSES)(hidden), noise])
        spread = Spread(name="spread")
        model.compile(
            "sgd",
            [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None],
            metrics=[None, [spread]],
        )
    x, y = data(24)
    zeros = np.zeros((24, 1), "float32")
    history = model.fit(x, (y, zeros), batch_size=8, epochs=2, verbose=0)
    named = {v.path: v.numpy() for v in model.variables}
    (mean,) = [v for path, v in named.items() if path.endswith("moving_mean")]
    (seed,) = [v for path, v in named.items() if "seed" in path]
    spreads = next(v for k, v in history.history.items() if "spread" in k)
    return {
        "moving_mean": mean,
        "seeds": [int(seed[1])],
        "masks_differ": max(spreads) > 1e-4,
    }


class Spread(keras.metrics.Metric):
    """Layer that returns the variance of its inputs."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sums = self.add_variable((3,), "zeros", name="sums")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ones = tf.ones_like(y_pred)
        sums = [tf.reduce_sum(t) for t in (ones, y_pred, tf.square(y_pred))]
        self.sums.assign(self.sums + tf.stack(sums))

    def result(self):
        count, total, squares = tf.unstack(self.sums.value)
        return tf.math.divide_no_nan(squares, count) - tf.square(
            tf.math.divide_no_nan(total, count)
        )


def backup_worker() -> dict:
    """Trains on two workers, of which the faster one suffices."""
    strategy = ParameterServerStrategy(synchronous=True, backup_workers=1)
    with strategy.scope():
        counted = CountedMean(name="samples")
    model = compiled(strategy, metrics=[InScope(lambda: counted)()])
    x, y = data(96)
    history = model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "samples": history.history["samples"][0],
    }


def loss_scaling() -> dict:
    """Trains in float16 with an overflow in one row, in the second share of a batch."""
    keras.config.set_dtype_policy("mixed_float16")
    strategy = rank_job.strategy()
    with strategy.scope():
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=1024.0
        )
    model = compiled(strategy, optimizer=optimizer, metrics=[])
    x, y = data(64)
    x[23] = np.inf
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    return {
        "weights": [v.numpy() for v in model.weights],
        "scale": float(optimizer.dynamic_scale.numpy()),
        "iterations": int(optimizer.iterations.numpy()),
    }


def accumulation() -> dict:
    """Trains with the gradients of two steps in one update."""
    strategy = rank_job.strategy()
    made = InScope(keras.optimizers.Adam, 0.01, gradient_accumulation_steps=2)
    model = compiled(strategy, optimizer=made)
    x, y = data(48)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return outcome(model, history)
