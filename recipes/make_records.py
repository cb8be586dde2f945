"""Writes images as TFRecords: sharded, indexed, and with a manifest of counts and digests.

    python recipes/make_records.py fashion/
    tfdml records verify fashion/
    tfdml launch --workers 2 recipes/fashion_mnist.py --records fashion/

For files of your own there is `tfdml records convert`: image folders, CSV, Parquet, IDX and others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import images
import numpy as np
import typer

import tfdml


def records(x: np.ndarray, y: np.ndarray) -> Iterator[dict]:
    """Yields the features of one record for each image.

    Args:
        x: Images from 0 to 1, float32 of shape `[n, height, width, channels]`.
        y: Classes of the images, int64 of shape `[n]`.
    """
    for image, label in zip(np.rint(x * 255).astype(np.uint8), y.tolist(), strict=True):
        yield {"image": image, "label": label}


def main(
    directory: Annotated[Path, typer.Argument(help="Where to write.")],
    shards: Annotated[int, typer.Option(min=1, help="Files for the training images.")] = 4,
    data: Annotated[
        str, typer.Option(help=f"Where the images come from: auto, {', '.join(images.SOURCES)}.")
    ] = "auto",
) -> None:
    """Write training and validation images as TFRecords."""
    dataset = images.load_or_exit(data)
    write = tfdml.data.write_tfrecords
    write(records(dataset.x, dataset.y), str(directory), split="train", shards=shards)
    write(records(dataset.x_val, dataset.y_val), str(directory), split="validation")
    typer.echo(f"{dataset.name}: written to {directory}")


if __name__ == "__main__":
    typer.run(main)
