"""Trains a variational autoencoder with a custom `train_step` on scikit-learn's digits.

    python recipes/own_train_step.py
    horovodrun -np 2 python recipes/own_train_step.py

The step does not mention replicas: it computes means, tracks losses and returns trackers' results
as on one process. See docs/custom_training.md for the one rule behind that.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import tfdml

CODE = 2


class Sampling(layers.Layer):
    """Layer that samples a code around its mean; each replica draws its own noise."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, mean: tf.Tensor, log_variance: tf.Tensor) -> tf.Tensor:
        """Returns a code for each row: shape `[rows, CODE]`."""
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class Autoencoder(keras.Model):
    """Variational autoencoder of 64 pixels."""

    def __init__(self):
        super().__init__()
        hidden = layers.Dense(64, activation="relu")
        self.encoder = keras.Sequential([layers.Input((64,)), hidden, layers.Dense(2 * CODE)])
        hidden = layers.Dense(64, activation="relu")
        self.decoder = keras.Sequential([layers.Input((CODE,)), hidden, layers.Dense(64)])
        self.sampling = Sampling()
        names = ("total", "reconstruction", "divergence")
        self.trackers = {name: keras.metrics.Mean(name=name) for name in names}

    def train_step(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Takes one step; returns the losses of the epoch so far."""
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(images), 2, axis=-1)
            drawn = self.decoder(self.sampling(mean, log_variance))
            pixels = keras.losses.binary_crossentropy(images, drawn, from_logits=True)
            reconstruction = 64 * ops.mean(pixels)
            divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
            divergence = 0.5 * ops.mean(ops.sum(divergence, axis=-1))
            total = reconstruction + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for name, loss in zip(self.trackers, (total, reconstruction, divergence), strict=True):
            self.trackers[name].update_state(loss)
        return {"loss" if n == "total" else n: t.result() for n, t in self.trackers.items()}


def main() -> None:
    """Train, and say how well digits are drawn again."""
    keras.utils.set_random_seed(0)
    images = (load_digits().data / 16).astype("float32")
    strategy = tfdml.HorovodStrategy()
    with strategy.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(3e-3))
    model.fit(images, batch_size=128, epochs=20)
    # Called on all ranks: a model of the scope predicts on all of them together.
    mean, _ = np.split(model.encoder.predict(images, verbose=0), 2, axis=-1)
    drawn = 1 / (1 + np.exp(-model.decoder.predict(mean, verbose=0)))
    if strategy.is_chief:
        print(f"mean error of a pixel: {np.abs(drawn - images).mean():.3f}")


if __name__ == "__main__":
    main()
