"""Trains at several sites over a slow link: each reads its own images, and they meet now and then.

    horovodrun -np 2 python recipes/local_updates.py
    horovodrun -np 2 python recipes/local_updates.py --sync-every auto --compression int4
    horovodrun -np 2 python recipes/local_updates.py --method diloco --sync-every 100
    horovodrun -np 2 python recipes/local_updates.py --method synchronous    # to compare

No image leaves its site: only what the weights have moved by does. This is federated averaging
without a server; docs/slow_networks.md says what it lacks. The traffic is neither authenticated nor
encrypted: between sites, use a tunnel, see SECURITY.md.
"""

import time
from typing import Annotated

import images
import keras
import tensorflow as tf
import typer
from large_batch import build_model

import tfdml


def own_images(dataset: images.Images, site: int, sites: int, batch_size: int) -> tf.data.Dataset:
    """Returns the batches of one site's images, which no other site reads.

    Args:
        dataset: All images. A real site has only its own.
        site: Number of the site, from 0.
        sites: Number of sites.
        batch_size: Images of a global batch.
    """
    own = tf.data.Dataset.from_tensor_slices((dataset.x[site::sites], dataset.y[site::sites]))
    own = own.shuffle(len(dataset.x), seed=site).batch(batch_size)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return own.with_options(options)


def make_method(name: str, sync_every: str) -> tfdml.local_updates.LocalUpdates | None:
    """Returns the strategy's argument `local_updates`.

    Args:
        name: "local_sgd", "diloco" or "synchronous".
        sync_every: A number of steps, or "auto".
    """
    steps = sync_every if sync_every == "auto" else int(sync_every)
    if name == "local_sgd":
        return tfdml.local_updates.LocalSGD(steps)
    if name == "diloco":
        return tfdml.local_updates.DiLoCo(steps)
    return None


def main(
    method: Annotated[
        str, typer.Option(help="local_sgd, diloco, or synchronous: an exchange in every step.")
    ] = "local_sgd",
    sync_every: Annotated[
        str, typer.Option(help="Steps between synchronizations, or auto: by the measured link.")
    ] = "16",
    compression: Annotated[
        str, typer.Option(help=f"One of {', '.join(tfdml.compression.names())}.")
    ] = "none",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of a global batch.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first images.")] = None,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
) -> None:
    """Train a small network at several sites, each with images of its own."""
    if method not in ("local_sgd", "diloco", "synchronous"):
        raise typer.BadParameter("--method must be local_sgd, diloco or synchronous.")
    if sync_every != "auto" and not (sync_every.isdigit() and int(sync_every)):
        raise typer.BadParameter("--sync-every must be a positive number of steps, or auto.")
    strategy = tfdml.HorovodStrategy(
        compression=compression, local_updates=make_method(method, sync_every)
    )
    dataset = images.load_or_exit(data, limit)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(dataset.x.shape[1:], classes=10)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    own = own_images(dataset, strategy.rank, strategy.size, batch_size)
    began = time.perf_counter()
    history = model.fit(
        own,
        epochs=epochs,
        validation_data=(dataset.x_val, dataset.y_val),
        validation_batch_size=2000,
    ).history
    if strategy.is_chief:
        typer.echo(
            f"{method}: validation accuracy {history['val_accuracy'][-1]:.4f} after "
            f"{epochs} epochs, {time.perf_counter() - began:.0f} s"
        )


if __name__ == "__main__":
    typer.run(main)
