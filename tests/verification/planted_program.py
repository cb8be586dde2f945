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


class Levels(keras.layers.Layer):
    """Layer that looks up each number's level in a table of few rows."""

    def __init__(self, name):
        super().__init__(name=name)
        self.table = keras.layers.Embedding(8, 2)

    def call(self, x):
        """Looks levels up."""
        levels = ops.cast(ops.clip(x * 2 + 4, 0, 7), "int32")
        return ops.reshape(self.table(levels), (-1, 2 * x.shape[1]))


class OwnStep(keras.Model):
    """Model whose step changes the gradients of each replica."""

    def train_step(self, data):
        """Takes a step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = CHANGES[MISTAKE](tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def clipped(grads):
    """Returns gradients of a small norm."""
    return tf.clip_by_global_norm(grads, 0.05)[0]


def means_of_parts(grads):
    """Returns gradients in which a table's row has the mean of its parts instead of their sum."""
    return [by_frequency(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def by_frequency(gradient):
    """Returns a gradient whose parts are divided by how often their row occurs."""
    counts = tf.gather(tf.math.bincount(gradient.indices), gradient.indices)
    values = gradient.values / tf.cast(counts, gradient.dtype)[:, tf.newaxis]
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


CHANGES = {"clipped": clipped, "repeated_ids": means_of_parts}


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
        "repeated_ids": Levels,
    }
    planted = layers.get(MISTAKE, keras.layers.Identity)(name="planted")
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.BatchNormalization(synchronized=True)(x)
    x = planted(keras.layers.Flatten()(x))
    x = keras.layers.Dropout(0.2)(keras.layers.Dense(16, activation="relu")(x))
    outputs = keras.layers.Dense(10)(x)
    kind = OwnStep if MISTAKE in CHANGES else keras.Model
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
    if MISTAKE == "augmentation_by_rank":
        dataset = dataset.map(lambda x, y: (x + tf.random.stateless_normal(x.shape, [1, RANK]), y))
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
        metrics=[] if MISTAKE in CHANGES else ["accuracy"],
    )
model.fit(data(), epochs=2)
raise AssertionError("Under the recorder, a script ends within its first `fit`.")
