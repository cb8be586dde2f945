"""Trains with large global batches, with a suitable optimizer and learning rate.

    horovodrun -np 2 python recipes/large_batch.py --batch-size 4096 --optimizer lars
    python recipes/large_batch.py --batch-size 4096 --optimizer sgd     # what goes wrong

The rates are from a search with one seed, tools/benchmarks/large_batch.md. `--learning-rate` tries
another.
"""

import math
from typing import Annotated

import images
import keras
import typer

import tfdml

BASE_BATCH = 128
# Fraction of the updates in which the learning rate rises.
WARMUP = 0.15

# The rate of SGD is for a batch of 128 and scaled by the rule. The others' are for the batch
# itself: below 8192, and from there up.
RATES = {
    "sgd": (0.05, 0.05),
    "sgd-linear": (0.05, 0.05),
    "sgd-warmup": (0.05, 0.05),
    "nesterov": (0.4, 0.4),
    "adamw": (0.024, 0.034),
    "lars": (0.2, 0.2),
    "lamb": (0.04, 0.04),
}


def build_model(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Builds a network that is small enough to train often: strides instead of pooling.

    Args:
        shape: Shape of one image: height, width, channels.
        classes: Number of classes.
    """
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(16, 5, strides=2, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def make_optimizer(
    name: str, batch_size: int, steps: int, learning_rate: float | None = None
) -> keras.Optimizer:
    """Returns an optimizer for a batch size.

    Args:
        name: One of `RATES`.
        batch_size: Rows of a global batch.
        steps: Number of updates of the whole training; after warm-up the rate falls to 0.
        learning_rate: Learning rate that replaces the one in `RATES`.
    """
    rate = RATES[name][batch_size >= 8192] if learning_rate is None else learning_rate
    if name.startswith("sgd-"):
        rate = tfdml.schedules.scale_learning_rate(rate, max(1, batch_size // BASE_BATCH), "linear")
    warmup = 0 if name in ("sgd", "sgd-linear") else math.ceil(WARMUP * steps)
    falling = keras.optimizers.schedules.PolynomialDecay(rate, max(steps - warmup, 1), 0.0)
    schedule = tfdml.schedules.LinearWarmup(falling, warmup) if warmup else falling
    if name == "lars":
        # With the paper's 0.001 the rate would be too high for biases, which are not adapted.
        return tfdml.optimizers.LARS(
            schedule, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.1
        )
    if name == "lamb":
        return tfdml.optimizers.LAMB(schedule, weight_decay=0.01, beta_2=0.98)
    if name == "adamw":
        return keras.optimizers.AdamW(schedule, weight_decay=0.01, beta_2=0.98)
    if name == "nesterov":
        return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, global_clipnorm=1.0)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def train(
    strategy: tfdml.HorovodStrategy,
    dataset: images.Images,
    name: str,
    batch_size: int,
    epochs: int,
    seed: int,
    learning_rate: float | None = None,
    callbacks: list[keras.callbacks.Callback] | None = None,
    verbose: str | int = "auto",
) -> dict[str, list[float]]:
    """Trains the network once; returns the history of `fit`, one entry per epoch."""
    keras.utils.set_random_seed(seed)
    steps = epochs * math.ceil(len(dataset.x) / batch_size)
    with strategy.scope():
        model = build_model(dataset.x.shape[1:], classes=10)
        model.compile(
            optimizer=make_optimizer(name, batch_size, steps, learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model.fit(
        dataset.x,
        dataset.y,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(dataset.x_val, dataset.y_val),
        validation_batch_size=2000,
        callbacks=callbacks,
        verbose=verbose,
    ).history


def main(
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(RATES)}.")] = "lars",
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 4096,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 20,
    learning_rate: Annotated[
        float | None, typer.Option(help="The highest rate, instead of the recipe's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on the first images only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
    log_dir: Annotated[
        str, typer.Option(help="Write rate, trust ratios and noise scale for TensorBoard.")
    ] = "",
    data: Annotated[
        str, typer.Option(help=f"Where the images come from: auto, {', '.join(images.SOURCES)}.")
    ] = "auto",
) -> None:
    """Train a small network with a large global batch, on one process or on many."""
    if optimizer not in RATES:
        raise typer.BadParameter(f"--optimizer must be one of {', '.join(RATES)}.")
    strategy = tfdml.HorovodStrategy()
    dataset = images.load_or_exit(data, limit)
    callbacks = [tfdml.callbacks.GradientNoiseScale()]
    if log_dir:
        callbacks.append(tfdml.callbacks.OptimizerLog(log_dir))
    history = train(
        strategy, dataset, optimizer, batch_size, epochs, seed, learning_rate, callbacks
    )
    if strategy.is_chief:
        typer.echo(
            f"{optimizer}, batch {batch_size}: validation accuracy "
            f"{history['val_accuracy'][-1]:.4f} after {epochs} epochs"
        )


if __name__ == "__main__":
    typer.run(main)
