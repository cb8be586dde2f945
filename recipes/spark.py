"""Trains on a Spark cluster: each task of Spark's is one process of the job.

    python recipes/spark.py --master "local-cluster[2,1,1024]" --data digits
    spark-submit --py-files recipes/images.py recipes/spark.py --tasks 4

Needs Java and `pip install pyspark spark-tensorflow-distributor`, besides tfdml on each machine.
The distributor starts all tasks at once and tells them each other's addresses in `TF_CONFIG`, as
`tfdml launch` does. What rank 0 returns comes back to the driver. See docs/spark.md.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import images
import keras
import numpy as np
import typer

import tfdml

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def build_model(shape: tuple[int, ...]) -> keras.Model:
    """Builds a network of two layers for ten classes.

    Args:
        shape: Shape of one image: height, width, channels.
    """
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def train(
    x: np.ndarray, y: np.ndarray, epochs: int, batch_size: int
) -> tuple[int, dict[str, list[float]], list[np.ndarray]]:
    """Trains on one process of a job, or on one alone.

    Args:
        x: All training images, of shape `[rows, height, width, channels]`.
        y: Their classes, of shape `[rows]`.
        epochs: Passes over them.
        batch_size: Images of a global batch.

    Returns:
        The number of processes, the history of `fit`, and the weights.
    """
    strategy = tfdml.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(x.shape[1:])
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    fitted = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0)
    return strategy.size, fitted.history, model.get_weights()


def start(master: str | None) -> "SparkSession":
    """Returns a session on a cluster.

    Args:
        master: The cluster's address, None for the one that spark-submit has chosen.
    """
    from pyspark.sql import SparkSession

    # Tasks run in this environment too, unless spark-submit has chosen another.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder if master is None else SparkSession.builder.master(master)
    # A process can be in one of TensorFlow's clusters only: the next job needs new ones.
    return builder.config("spark.python.worker.reuse", "false").getOrCreate()


def main(
    master: Annotated[
        str | None, typer.Option(help="Spark's cluster; else that of spark-submit.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Processes; each needs a slot.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 128,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file for the model: .keras.")] = None,
) -> None:
    """Train a small network on Spark's tasks, and test it on the driver."""
    from spark_tensorflow_distributor import MirroredStrategyRunner

    spark = start(master)
    dataset = images.load(data).limited(limit)
    shared = spark.sparkContext.broadcast((dataset.x, dataset.y))

    def task() -> tuple[int, dict[str, list[float]], list[np.ndarray]]:
        return train(*shared.value, epochs, batch_size)

    # A strategy of tfdml's is a custom one.
    runner = MirroredStrategyRunner(num_slots=tasks, use_gpu=False, use_custom_strategy=True)
    size, history, weights = runner.run(task)
    model = build_model(dataset.x.shape[1:])
    model.set_weights(weights)
    correct = model.predict(dataset.x_val, verbose=0).argmax(axis=-1) == dataset.y_val
    typer.echo(f"{size} tasks, loss {history['loss'][-1]:.4f}, accuracy {correct.mean():.3f}")
    if output is not None:
        model.save(output)
    spark.stop()


if __name__ == "__main__":
    typer.run(main)
