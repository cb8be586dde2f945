"""Trains a small convolutional network on images, with one process or many.

    python recipes/fashion_mnist.py
    tfdml launch --workers 2 recipes/fashion_mnist.py
    horovodrun -np 2 python recipes/fashion_mnist.py --strategy horovod

    python recipes/make_records.py fashion/              # or from TFRecords: written once,
    tfdml records verify fashion/                        # checked,
    tfdml launch --workers 2 recipes/fashion_mnist.py --records fashion/    # and read

One process and many give the same model: a batch of `--batch-size` images is the *global* batch,
which the strategy splits over the processes. Compared with a script for one process, two lines
differ: the strategy, and its scope around the model.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import images
import keras
import numpy as np
import tensorflow as tf
import typer

import tfdml

STRATEGIES = {
    "multi_worker": tfdml.MultiWorkerMirroredStrategy,
    "horovod": tfdml.HorovodStrategy,
}


def build_model(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Builds the network.

    Args:
        shape: Shape of one image: height, width, channels.
        classes: Number of classes.
    """
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def read_records(directory: Path, batch_size: int, seed: int) -> tuple:
    """Returns pipelines of the images written by recipes/make_records.py.

    Under the strategy's scope, each process reads and decodes only its own rows of every batch.

    Args:
        directory: Directory of the records.
        batch_size: Images of a global batch.
        seed: Seed of the order of the training images.

    Returns:
        Pipelines for training and validation, with images from 0 to 1 and their classes.
    """

    def scaled(x, y):
        return tf.cast(x, tf.float32) / 255.0, y

    options = {"label": "label", "features": ["image"], "transform": scaled}
    read = tfdml.data.read_tfrecords
    return (
        read(directory, batch_size, "train", seed=seed, **options),
        read(directory, batch_size, "validation", shuffle=False, **options),
    )


class Throughput(keras.callbacks.Callback):
    """Callback that measures the training time of each epoch, without validation.

    Attributes:
        seconds: Training time of each epoch. The first includes tracing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began = 0.0
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Starts the clock."""
        self._began, self._training = time.perf_counter(), True

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Stops the clock when validation begins."""
        self._stop()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Stops the clock of an epoch without validation."""
        self._stop()

    def _stop(self) -> None:
        if self._training:
            self.seconds.append(time.perf_counter() - self._began)
            self._training = False

    def samples_per_second(self, samples: int) -> float:
        """Returns the steady rate: that of the epochs after the first, or of the only one.

        Args:
            samples: Number of samples of an epoch.
        """
        steady = self.seconds[1:] or self.seconds
        return samples * len(steady) / sum(steady)


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 4,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images of a global batch, split over all processes.")
    ] = 256,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on the first images only.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Read TFRecords in this directory; see make_records.py.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write history.json and weights.npz into this directory.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Save here every 50 steps, and resume from what is here.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
    strategy_name: Annotated[
        str, typer.Option("--strategy", help=f"One of {', '.join(STRATEGIES)}.")
    ] = "multi_worker",
    data: Annotated[
        str, typer.Option(help=f"Where the images come from: auto, {', '.join(images.SOURCES)}.")
    ] = "auto",
) -> None:
    """Train a small convolutional network on Fashion-MNIST, on one process or on many.

    Start it by `python` for one process or by `tfdml launch --workers N` for N: the result is the
    same. On several hosts choose `--data` by hand, so that all of them read the same images.
    """
    if strategy_name not in STRATEGIES:
        raise typer.BadParameter(
            f"--strategy must be one of {', '.join(STRATEGIES)}. Received: {strategy_name}"
        )
    keras.utils.set_random_seed(seed)
    strategy = STRATEGIES[strategy_name]()
    if records is not None and (limit is not None or data != "auto"):
        raise typer.BadParameter("--limit and --data must be left out with --records.")
    dataset = images.load_or_exit(data, limit) if records is None else None
    with strategy.scope():
        if dataset is None:
            train, validation = read_records(records, batch_size, seed)
            name, samples = f"TFRecords in {records}", train.records
            shape, held_out = train.element_spec[0].shape[1:], validation.records
            # The records are shuffled by the pipeline; Keras would warn that it cannot.
            arguments = {"x": train, "validation_data": validation, "shuffle": False}
            callbacks = [train.callback()]
        else:
            name, samples, held_out = dataset.name, len(dataset.x), len(dataset.x_val)
            shape, callbacks = dataset.x.shape[1:], []
            arguments = {"x": dataset.x, "y": dataset.y, "batch_size": batch_size}
            arguments["validation_data"] = (dataset.x_val, dataset.y_val)
        model = build_model(shape, classes=10)
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    if strategy.is_chief:
        typer.echo(
            f"{name}: {samples} images to train on, {held_out} to "
            f"validate; {strategy.size} process{'es' if strategy.size > 1 else ''}"
        )
    throughput = Throughput()
    if checkpoint is not None:
        callbacks.append(tfdml.callbacks.FaultTolerantCheckpoint(str(checkpoint), save_freq=50))
    history = model.fit(**arguments, epochs=epochs, callbacks=[throughput, *callbacks]).history
    if not strategy.is_chief:
        return
    rate = throughput.samples_per_second(samples)
    typer.echo(
        f"accuracy: train {history['accuracy'][-1]:.4f}, validation "
        f"{history['val_accuracy'][-1]:.4f}; {rate:,.0f} samples/s"
    )
    if output is not None:
        facts = {
            "data": name,
            "processes": strategy.size,
            "samples": samples,
            "batch_size": batch_size,
            "seed": seed,
            "samples_per_second": rate,
            "seconds": throughput.seconds,
            "history": history,
        }
        write_results(output, facts, model)


def write_results(directory: Path, facts: dict, model: keras.Model) -> None:
    """Writes the measurements and the final weights.

    Args:
        directory: Directory to write to, created if necessary.
        facts: Content of history.json.
        model: Trained model, whose weights go into weights.npz under their paths.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "history.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    weights = {f"{i:03d} {w.path}": np.asarray(w) for i, w in enumerate(model.weights)}
    np.savez(directory / "weights.npz", **weights)
    typer.echo(f"written: {directory / 'history.json'}, {directory / 'weights.npz'}")


if __name__ == "__main__":
    typer.run(main)
