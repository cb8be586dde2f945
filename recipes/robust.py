"""Trains on several sites of which one has wrong data, and names it.

    horovodrun -np 4 python recipes/robust.py
    horovodrun -np 4 python recipes/robust.py --rule clipping
    horovodrun -np 4 python recipes/robust.py --rule mean            # to compare

Each rank reads its own images; those of the last rank are noise with large numbers, as a broken
sensor, decoder or memory would give. docs/robust.md says what a rule protects from, and what not.
"""

from typing import Annotated

import images
import keras
import numpy as np
import tensorflow as tf
import typer
from large_batch import build_model

import tfdml

RULES = {
    "mean": None,
    "trimmed": tfdml.aggregation.TrimmedMean(num_byzantine=1),
    "clipping": tfdml.aggregation.CenteredClipping(radius=1.0, momentum=0.9),
}


def own_images(
    dataset: images.Images, rank: int, ranks: int, batch_size: int, scale: float
) -> tf.data.Dataset:
    """Returns the batches of one rank's images, which no other rank reads.

    Args:
        dataset: All images. A real site has only its own.
        rank: The rank.
        ranks: The number of ranks; the last one's images are wrong.
        batch_size: Images of a global batch.
        scale: Standard deviation of the wrong images' numbers.
    """
    x, y = dataset.x[rank::ranks], dataset.y[rank::ranks]
    if rank == ranks - 1:
        noise = np.random.default_rng(0).normal(size=x.shape)
        x = (scale * noise).astype("float32")
    own = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=rank).batch(batch_size)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return own.with_options(options)


def main(
    rule: Annotated[str, typer.Option(help=f"One of {', '.join(RULES)}.")] = "trimmed",
    scale: Annotated[float, typer.Option(help="Size of the wrong images' numbers.")] = 20.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = None,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
) -> None:
    """Train a small network on ranks of which one has wrong images."""
    if rule not in RULES:
        raise typer.BadParameter(f"--rule must be one of {', '.join(RULES)}.")
    strategy = tfdml.HorovodStrategy(gradient_aggregation=RULES[rule])
    dataset = images.load_or_exit(data, limit)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(dataset.x.shape[1:], classes=10)
        # Each rank averages its gradients itself, if the rule clips them.
        rate, momentum = (0.5, 0.0) if rule == "clipping" else (0.05, 0.9)
        model.compile(
            keras.optimizers.SGD(rate, momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    own = own_images(dataset, strategy.rank, strategy.size, batch_size, scale)
    history = model.fit(
        own,
        epochs=epochs,
        validation_data=(dataset.x_val, dataset.y_val),
        validation_batch_size=2000,
        callbacks=[tfdml.callbacks.OutlierMonitor()],
    ).history
    if strategy.is_chief:
        accuracy = history["val_accuracy"][-1]
        typer.echo(f"{rule}: validation accuracy {accuracy:.4f} after {epochs} epochs")


if __name__ == "__main__":
    typer.run(main)
