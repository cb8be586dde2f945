"""Trains a GAN: a custom `train_step` with two networks and two optimizers.

    python recipes/gan.py
    tfdml launch --workers 2 recipes/gan.py
    horovodrun -np 2 python recipes/gan.py --strategy horovod

The step is written as for one process; docs/custom_training.md has the rule behind that. Each
optimizer's gradients are summed over all processes. The noise comes with the data, so N processes
work with the noise of one and give its model. Noise drawn in the step would be each replica's own.
"""

import math
from typing import Annotated

import images
import keras
import numpy as np
import tensorflow as tf
import typer
from keras import layers, ops

import tfdml

CODE = 32  # Numbers of noise from which an image is made.
STRATEGIES = {
    "multi_worker": tfdml.MultiWorkerMirroredStrategy,
    "horovod": tfdml.HorovodStrategy,
}


def build_generator(shape: tuple[int, ...]) -> keras.Model:
    """Builds the network that makes images.

    Args:
        shape: Shape of one image.
    """
    hidden = []
    for units in (128, 256):
        # Synchronized: its statistics are those of the global batch.
        normalization = layers.BatchNormalization(synchronized=True)
        hidden += [layers.Dense(units, use_bias=False), normalization, layers.LeakyReLU(0.2)]
    last = [layers.Dense(math.prod(shape), activation="sigmoid"), layers.Reshape(shape)]
    return keras.Sequential([keras.Input((CODE,)), *hidden, *last], name="generator")


def build_discriminator(shape: tuple[int, ...]) -> keras.Model:
    """Builds the network that judges images to be real or generated: one logit for each image.

    Args:
        shape: Shape of one image.
    """
    hidden = []
    for units in (256, 128):
        hidden += [layers.Dense(units), layers.LeakyReLU(0.2)]
    return keras.Sequential(
        [keras.Input(shape), layers.Flatten(), *hidden, layers.Dense(1)], name="discriminator"
    )


class GAN(keras.Model):
    """Generator and discriminator, trained in turn on batches of noise and real images."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.generator, self.discriminator = build_generator(shape), build_discriminator(shape)
        networks = (self.generator, self.discriminator)
        self.trackers = [keras.metrics.Mean(name=f"{network.name}_loss") for network in networks]

    def compile(
        self,
        generator_optimizer: keras.optimizers.Optimizer,
        discriminator_optimizer: keras.optimizers.Optimizer,
    ) -> None:
        """Sets an optimizer for each network."""
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer

    def train_step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Trains the discriminator, then the generator; returns the losses of the epoch so far."""
        noise, real = batch
        with tf.GradientTape() as tape:
            generated = self.generator(noise, training=True)
            discriminator_loss = ops.mean(
                ops.softplus(-self.discriminator(real, training=True))
                + ops.softplus(self.discriminator(generated, training=True))
            )
        weights = self.discriminator.trainable_variables
        self.discriminator_optimizer.apply(tape.gradient(discriminator_loss, weights), weights)
        with tf.GradientTape() as tape:
            generated = self.generator(noise, training=True)
            generator_loss = ops.mean(ops.softplus(-self.discriminator(generated, training=True)))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(generator_loss, weights), weights)
        losses = (generator_loss, discriminator_loss)
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def batches(real: np.ndarray, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns batches of noise and real images, in a new order and with new noise each epoch.

    Args:
        real: Images of shape (n, height, width, channels).
        batch_size: Images of a global batch.
        seed: Seed of the order and the noise, the same on all processes.
    """

    def with_noise(batch, number):
        return tf.random.stateless_normal((tf.shape(batch)[0], CODE), (seed, number)), batch

    shuffled = tf.data.Dataset.from_tensor_slices(real).shuffle(len(real), seed=seed)
    numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
    return tf.data.Dataset.zip(shuffled.batch(batch_size), numbers).map(with_noise)


def distance(one: np.ndarray, other: np.ndarray, directions: int = 128) -> float:
    """Returns the sliced Wasserstein distance between two sets of as many images.

    Along random directions, the images of both sets are sorted, and those of equal place compared.

    Args:
        one: Images of shape (n, ...).
        other: Images of the same shape.
        directions: Number of directions in the space of the pixels.

    References:
        Bonneel et al., "Sliced and Radon Wasserstein Barycenters of Measures", 2015.
    """
    one, other = (images.reshape(len(images), -1) for images in (one, other))
    along = np.random.default_rng(0).normal(size=(one.shape[1], directions))
    along /= np.linalg.norm(along, axis=0)
    return float(np.abs(np.sort(one @ along, axis=0) - np.sort(other @ along, axis=0)).mean())


def train(
    strategy, real: np.ndarray, epochs: int, batch_size: int, seed: int
) -> tuple[GAN, dict[str, list[float]]]:
    """Trains under a strategy.

    Args:
        strategy: The strategy, of which each process calls this.
        real: Images of shape (n, height, width, channels).
        epochs: Passes over the images.
        batch_size: Images of a global batch.
        seed: Seed of the order and the noise.

    Returns:
        The model and its history.
    """
    with strategy.scope():
        model = GAN(real.shape[1:])
        model.compile(*(keras.optimizers.Adam(1e-3, beta_1=0.5) for _ in range(2)))
    fitted = model.fit(batches(real, batch_size, seed), epochs=epochs, shuffle=False)
    return model, fitted.history


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the real images.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = 12_000,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and noise.")] = 0,
    strategy_name: Annotated[
        str, typer.Option("--strategy", help=f"One of {', '.join(STRATEGIES)}.")
    ] = "multi_worker",
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
) -> None:
    """Train a GAN on one process or on many, and say how far its images are from real ones."""
    if strategy_name not in STRATEGIES:
        raise typer.BadParameter(f"--strategy must be one of {', '.join(STRATEGIES)}.")
    keras.utils.set_random_seed(seed)
    strategy = STRATEGIES[strategy_name]()
    dataset = images.load_or_exit(data, limit)
    model, _ = train(strategy, dataset.x, epochs, batch_size, seed)
    real = dataset.x_val
    noise = np.random.default_rng(seed + 1).normal(size=(len(real), CODE)).astype("float32")
    # Called on all ranks: a model of the scope predicts on all of them together.
    made = model.generator.predict(noise, verbose=0)
    if strategy.is_chief:
        typer.echo(
            f"distance to real images: {distance(made, real):.4f}; of other real images "
            f"{distance(dataset.x[: len(real)], real):.4f}, of grey ones "
            f"{distance(np.full_like(real, real.mean()), real):.4f}"
        )


if __name__ == "__main__":
    typer.run(main)
