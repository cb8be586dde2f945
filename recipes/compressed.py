"""Trains with compressed gradients: two lines differ from training without.

    horovodrun -np 2 python recipes/compressed.py
    horovodrun -np 2 python recipes/compressed.py --compression powersgd

With "auto" tfdml measures the network and the codecs, prints what it expects, tries it, and says
what was true; it does not compress where that is faster. `tfdml bench` prints the same table, for
all compressors, before you train anything. Which to choose by hand: see docs/compression.md.
"""

from typing import Annotated

import images
import keras
import typer
from fashion_mnist import build_model

import tfdml


def main(
    compression: Annotated[
        str, typer.Option(help="auto, fp16, int8, int4, powersgd, onebit, topk, ... or none.")
    ] = "auto",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = None,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
) -> None:
    """Train a small convolutional network with compressed gradients."""
    keras.utils.set_random_seed(0)
    chosen = None if compression == "none" else compression
    strategy = tfdml.HorovodStrategy(compression=chosen)
    with strategy.scope():
        dataset = images.load(data).limited(limit)
        model = build_model(dataset.x.shape[1:], classes=10)
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(dataset.x, dataset.y, batch_size=batch_size, epochs=epochs)
    scores = model.evaluate(dataset.x_val, dataset.y_val, batch_size=1000, verbose=0)
    if strategy.is_chief:
        typer.echo(f"accuracy with {compression}: {100 * scores[1]:.2f} %")


if __name__ == "__main__":
    typer.run(main)
