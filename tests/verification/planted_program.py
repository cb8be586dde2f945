"""Training script with one planted mistake, named by its argument; `none` has none.

The mistakes are such that losses still fall on several processes: nothing but a comparison with
one process shows them.
"""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdml

MISTAKE = sys.argv[1]
strategy = tfdml.MultiWorkerMirroredStrategy()
SIZE, RANK = strategy.size, strategy.rank


class Noise(keras.layers.Layer):
    """Layer that adds random numbers of a seed that each process has for itself."""

    def call(self, x):
        """Adds the numbers."""
        return x + 0.1 * tf.random.stateless_normal(tf.shape(x), [1, RANK])


class OwnDropout(keras.layers.Layer):
    """Dropout that draws without a seed."""

    def call(self, x, training=False):
        """Drops some numbers."""
        return tf.nn.dropout(x, 0.3) if training else x


class ByBatchSize(keras.layers.Layer):
    """Layer that divides by the number of rows."""

    def call(self, x):
        """Divides."""
        return x / ops.cast(ops.shape(x)[0], x.dtype) * 32.0


class ByRank(keras.layers.Layer):
    """Layer whose factor depends on the rank."""

    def call(self, x):
        """Multiplies."""
        return x * (1.0 if RANK == 0 else 1.01)


class ClippedByReplica(keras.Model):
    """Model whose step clips the gradients of each replica."""

    def train_step(self, data):
        """Takes a step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        grads, _ = tf.clip_by_global_norm(grads, 0.05)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def summed_squares(y, predicted):
    """Returns the sum over all rows."""
    return ops.sum(ops.square(ops.one_hot(ops.reshape(y, [-1]), 10) - predicted))


def build():
    """Builds the model."""
    layers = {
        "BatchNormalization": keras.layers.BatchNormalization,
        "Dropout": OwnDropout,
        "noise": Noise,
        "batch_size": ByBatchSize,
        "rank": ByRank,
    }
    planted = layers.get(MISTAKE, keras.layers.Identity)(name="planted")
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.BatchNormalization(synchronized=True)(x)
    x = planted(keras.layers.Flatten()(x))
    x = keras.layers.Dropout(0.2)(keras.layers.Dense(16, activation="relu")(x))
    outputs = keras.layers.Dense(10)(x)
    kind = ClippedByReplica if MISTAKE == "clipped" else keras.Model
    return kind(inputs, outputs)


def data():
    """Returns the data: a dataset of images and labels."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(256, 8, 8, 1)).astype("float32")
    y = generator.integers(0, 10, 256)
    if MISTAKE in ("own_part", "uneven", "repeated_rows"):
        return own_part(x, y)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if MISTAKE == "shuffle":
        dataset = dataset.shuffle(256)
    if MISTAKE == "shuffle_by_rank":
        dataset = dataset.shuffle(256, seed=RANK)
    if MISTAKE == "augmentation":
        dataset = dataset.map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y))
    if MISTAKE == "shard":
        dataset = dataset.shard(SIZE, RANK)
    return dataset.batch(32 * SIZE if MISTAKE == "batch" else 32)


def own_part(x, y):
    """Returns a dataset of which each rank reads its own part; right if parts are dealt in turn."""
    if MISTAKE != "repeated_rows":
        x, y = x[RANK::SIZE], y[RANK::SIZE]
    if MISTAKE == "uneven" and RANK:
        x, y = x[:20], y[:20]
    options = tf.data.Options()
    off = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = off
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(32).with_options(options)


with strategy.scope():
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = 1e-3 * (SIZE if MISTAKE == "rate" else 1)
    model.compile(
        keras.optimizers.Adam(rate),
        summed_squares if MISTAKE == "summed_loss" else loss,
        metrics=[] if MISTAKE == "clipped" else ["accuracy"],
    )
model.fit(data(), epochs=2)
raise AssertionError("Under the recorder, a script ends within its first `fit`.")
