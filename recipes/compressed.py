"""Trains with compressed gradients: one argument differs from training without.

    tfdml launch --workers 2 recipes/compressed.py
    tfdml launch --workers 2 recipes/compressed.py --compression powersgd
    horovodrun -np 2 python recipes/compressed.py --strategy horovod

With "auto" tfdml measures the network and the codecs, prints what it expects, tries it, and says
what was true; it does not compress where that is faster. `tfdml bench` prints the same table, for
all compressors, before you train anything. Which to choose by hand: see docs/compression.md.
"""

import json
from pathlib import Path
from typing import Annotated

import images
import keras
import typer
from fashion_mnist import STRATEGIES, Throughput, build_model

import tfdml


def build_dense(shape: tuple[int, ...], classes: int, width: int) -> keras.Model:
    """Builds a network of two wide layers: large gradients for little computation.

    Args:
        shape: Shape of one image: height, width, channels.
        classes: Number of classes.
        width: Units of each layer.
    """
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def main(
    compression: Annotated[
        str, typer.Option(help=f"One of {', '.join(tfdml.compression.names())}.")
    ] = "auto",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Two dense layers of this width, no convolutions.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A file for the numbers, as JSON.")] = None,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
    strategy_name: Annotated[
        str, typer.Option("--strategy", help=f"One of {', '.join(STRATEGIES)}.")
    ] = "multi_worker",
) -> None:
    """Train a small network with compressed gradients, and say what a step took."""
    if strategy_name not in STRATEGIES:
        raise typer.BadParameter(f"--strategy must be one of {', '.join(STRATEGIES)}.")
    keras.utils.set_random_seed(0)
    strategy = STRATEGIES[strategy_name](compression=compression)
    dataset = images.load(data).limited(limit)
    shape = dataset.x.shape[1:]
    with strategy.scope():
        model = build_model(shape, 10) if width is None else build_dense(shape, 10, width)
        model.compile(
            keras.optimizers.SGD(0.03, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    clock = Throughput()
    model.fit(dataset.x, dataset.y, batch_size=batch_size, epochs=epochs, callbacks=[clock])
    scores = model.evaluate(dataset.x_val, dataset.y_val, batch_size=1000, verbose=0)
    if not strategy.is_chief:
        return
    milliseconds = 1000 * batch_size / clock.samples_per_second(len(dataset.x))
    typer.echo(
        f"accuracy with {compression}: {100 * scores[1]:.2f} %, {milliseconds:,.1f} ms a step"
    )
    if output is not None:
        facts = {
            "compression": compression,
            "accuracy": scores[1],
            "milliseconds": milliseconds,
            "bytes": 4 * model.count_params(),
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(facts, indent=2), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
