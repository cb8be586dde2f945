"""Cases run by a chief: loss scaling in asynchronous training."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml.mixed_precision
from tests.strategies.parameter_server.cases import fit_until_all_are_busy
from tfdml.strategies import ParameterServerStrategy

STEPS = 100
# One of ten batches overflows; two workers, each reading every other batch, get it in turn.
_CYCLE, _OVERFLOWS = 20, (3, 14)
SCALE = 2.0**30


class Sum(keras.metrics.Metric):
    """Returns the sum of the labels."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sum = self.add_variable((), "zeros", name="sum")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sum.assign_add(tf.reduce_sum(tf.cast(y_true, self.sum.dtype)))

    def result(self):
        return tf.identity(self.sum.value)


def _model(kind: str, cls: type[keras.Model] = keras.Model, **scaling) -> keras.Model:
    """A model with one weight, whose gradient is 1 in each finite step."""
    strategy = ParameterServerStrategy()
    wrap = {"keras": keras.mixed_precision, "tfdml": tfdml.mixed_precision}[kind]
    with strategy.scope():
        inputs = layers.Input((1,))
        outputs = layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
        model = cls(inputs, outputs)
        optimizer = wrap.LossScaleOptimizer(keras.optimizers.SGD(1.0), **scaling)
        model.compile(optimizer, lambda y, p: -p, metrics=[Sum(name="overflows")])
    return model


def _batches() -> tf.data.Dataset:
    numbers = tf.range(_CYCLE)
    overflows = tf.reduce_any(numbers[:, None] == tf.constant(_OVERFLOWS), 1)
    x = tf.where(overflows, np.inf, 1.0)[:, None]
    y = tf.cast(overflows, tf.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(1).repeat()


def overflows(kind: str) -> dict:
    """Trains with two busy workers and overflowing batches, while the scale grows often."""
    model = _model(kind, initial_scale=1.0, dynamic_growth_steps=2)
    fit_until_all_are_busy(model, _batches())
    (weight,) = model.trainable_variables
    weight.assign([[0.0]])
    model.optimizer.dynamic_scale.assign(1.0)
    before = int(model.optimizer.iterations.numpy())
    history = model.fit(_batches(), steps_per_epoch=STEPS, verbose=0)
    return {
        "weight": float(weight.numpy()[0, 0]),
        "iterations": int(model.optimizer.iterations.numpy()) - before,
        "overflows": int(history.history["overflows"][0]),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
    }


def counted_past_the_growth() -> float:
    """Returns the scale after the workers have together skipped the step at which it grows."""
    model = _model("keras", initial_scale=1.0, dynamic_growth_steps=4)
    finite = _batches().take(2).repeat()
    model.fit(finite, steps_per_epoch=1, verbose=0)
    model.optimizer.step_counter.assign(9)
    model.optimizer.dynamic_scale.assign(1.0)
    model.fit(finite, steps_per_epoch=10, verbose=0)
    return float(model.optimizer.dynamic_scale.numpy())


class BesideAnother(keras.Model):
    """A model during whose step another worker changes the scale."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        with tf.control_dependencies(gradients):
            self.optimizer.dynamic_scale._value.assign(SCALE / 8)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def changed_in_the_middle(overflow: bool) -> dict:
    """Trains one step during which the scale changes."""
    model = _model("keras", BesideAnother, initial_scale=SCALE)
    x = np.full((1, 1), np.inf if overflow else 1.0, "float32")
    model.fit(tf.data.Dataset.from_tensors((x, x)).repeat(), steps_per_epoch=1, verbose=0)
    return {
        "weight": float(model.trainable_variables[0].numpy()[0, 0]),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
    }
