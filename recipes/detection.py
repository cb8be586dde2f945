"""Finds, names and outlines an item in a picture: one network with three outputs.

    python recipes/detection.py
    tfdml launch --workers 2 recipes/detection.py

Each picture has one item of Fashion-MNIST at a random place, among scraps of other items. The
outputs are the item's class, the box around it, and the mask of its pixels; each has its own loss,
weight and metric, given by the output's name. One process and many give the same model.
"""

from typing import Annotated

import images
import keras
import numpy as np
import typer
from keras import layers, ops

import tfdml

SCRAPS = 4
# What is darker belongs to the background.
VISIBLE = 0.1
Targets = dict[str, np.ndarray]


def compose(
    items: np.ndarray, classes: np.ndarray, count: int, seed: int
) -> tuple[np.ndarray, Targets]:
    """Places items on pictures of twice their height and width.

    Args:
        items: Images of shape (n, side, side, 1) from 0 to 1.
        classes: Their classes, of shape (n,).
        count: Number of pictures; each has one item drawn at random.
        seed: Seed of items, places and scraps.

    Returns:
        Pictures of shape (count, 2 side, 2 side, 1) and their targets: `label` of shape (count,),
        `box` of shape (count, 4), with top, left, bottom and right as parts of the picture's side,
        and `mask` of the pictures' shape, 1 on the item.
    """
    rng = np.random.default_rng(seed)
    side, scrap = items.shape[1], items.shape[1] // 3
    pictures = np.zeros((count, 2 * side, 2 * side, 1), "float32")
    masks, boxes = np.zeros_like(pictures), np.zeros((count, 4), "float32")
    chosen = rng.integers(len(items), size=count)
    for picture, mask, box, item in zip(pictures, masks, boxes, items[chosen], strict=True):
        for other in items[rng.integers(len(items), size=SCRAPS)]:
            (y, x), (top, left) = (rng.integers(n - scrap + 1, size=2) for n in (side, 2 * side))
            picture[top : top + scrap, left : left + scrap] = other[y : y + scrap, x : x + scrap]
        top, left = rng.integers(side + 1, size=2)
        place = (slice(top, top + side), slice(left, left + side))
        mask[place] = item > VISIBLE
        picture[place] = np.where(mask[place], item, picture[place])
        rows, columns = (np.flatnonzero(mask.any((axis, 2))) for axis in (1, 0))
        box[:] = rows[0], columns[0], rows[-1] + 1, columns[-1] + 1
    return pictures, {"label": classes[chosen], "box": boxes / (2 * side), "mask": masks}


def build_model(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Builds the network: a common body, and a head for each output.

    Args:
        shape: Shape of one picture: height and width, which 8 must divide, and channels.
        classes: Number of classes.
    """

    def convolution(x, filters, strides=1):
        return layers.Conv2D(filters, 3, strides, padding="same", activation="relu")(x)

    picture = keras.Input(shape)
    half = convolution(picture, 16, strides=2)
    quarter = convolution(half, 32, strides=2)
    eighth = convolution(convolution(quarter, 64, strides=2), 64)
    place = layers.Dense(128, activation="relu")(layers.Flatten()(eighth))
    # What it is does not depend on where it is.
    kind = layers.GlobalMaxPooling2D()(convolution(convolution(half, 64), 64))
    drawn = eighth
    for detail, filters in ((quarter, 32), (half, 16), (picture, 8)):
        drawn = layers.Concatenate()([layers.UpSampling2D()(drawn), detail])
        drawn = convolution(drawn, filters)
    outputs = {
        "label": layers.Dense(classes, name="label")(kind),
        "box": layers.Dense(4, activation="sigmoid", name="box")(place),
        "mask": layers.Conv2D(1, 1, name="mask")(drawn),
    }
    return keras.Model(picture, outputs)


def overlap(truth, found):
    """Returns the area that two boxes share, divided by the area that they cover: shape (rows,)."""

    def area(top_left, bottom_right):
        return ops.prod(ops.maximum(bottom_right - top_left, 0), axis=-1)

    shared = area(ops.maximum(truth[:, :2], found[:, :2]), ops.minimum(truth[:, 2:], found[:, 2:]))
    covered = area(truth[:, :2], truth[:, 2:]) + area(found[:, :2], found[:, 2:]) - shared
    return shared / covered


def train(
    strategy, dataset: images.Images, pictures: int, epochs: int, batch_size: int
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Trains under a strategy.

    Args:
        strategy: The strategy, of which each process calls this.
        dataset: The items.
        pictures: Number of pictures to train on; a fifth as many are for validation.
        epochs: Passes over the pictures.
        batch_size: Pictures of a global batch.

    Returns:
        The model and its history.
    """
    x, y = compose(dataset.x, dataset.y, pictures, seed=1)
    held_out = compose(dataset.x_val, dataset.y_val, pictures // 5, seed=2)
    with strategy.scope():
        model = build_model(x.shape[1:], classes=10)
        model.compile(
            keras.optimizers.Adam(2e-3),
            loss={
                "label": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "box": "mean_absolute_error",
                "mask": keras.losses.BinaryCrossentropy(from_logits=True),
            },
            loss_weights={"label": 1.0, "box": 10.0, "mask": 2.0},
            metrics={
                "label": "accuracy",
                "box": overlap,
                "mask": keras.metrics.BinaryIoU(
                    target_class_ids=[1], threshold=0.0, name="overlap"
                ),
            },
        )
    fitted = model.fit(x, y, batch_size, epochs, validation_data=held_out)
    return model, fitted.history


def main(
    pictures: Annotated[int, typer.Option(min=5, help="Pictures to train on.")] = 10_000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pictures.")] = 6,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures of a global batch.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
) -> None:
    """Train a network that finds, names and outlines items, on one process or on many."""
    keras.utils.set_random_seed(seed)
    strategy = tfdml.MultiWorkerMirroredStrategy()
    dataset = images.load_or_exit(data)
    _, history = train(strategy, dataset, pictures, epochs, batch_size)
    if strategy.is_chief:
        names = ("label_accuracy", "box_overlap", "mask_overlap")
        values = [f"{name} {history[f'val_{name}'][-1]:.3f}" for name in names]
        typer.echo(f"pictures not seen: {', '.join(values)}")


if __name__ == "__main__":
    typer.run(main)
