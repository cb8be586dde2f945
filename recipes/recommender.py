"""Trains a recommender, with its embeddings in parts on parameter servers, or under any strategy.

    tfdml launch --workers 2 --ps 2 recipes/recommender.py
    tfdml launch --workers 2 recipes/recommender.py --strategy multi_worker
    horovodrun -np 2 python recipes/recommender.py --strategy horovod --sharding
    python recipes/recommender.py --strategy mirrored

The strategy is one line, all else is the same. Users and items have hidden tastes, from which the
data are made as they are read, by TensorFlow's own operations: workers make them for themselves.
`--users 10000000` makes a table of 640 MB. `--sharding` divides the tables among the ranks of
`horovod` and `multi_worker`, as servers always have them. `--optimizer` is one that moves only the
rows that a batch has looked up: Keras's Adam and Adagrad work on all rows in every step.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import keras
import tensorflow as tf
import typer

import tfdml

# Shards of 16 KB or more; for real tables use a few MB or more.
PARTS = tf.distribute.experimental.partitioners.MinSizePartitioner(16 << 10, max_shards=8)
# The same between ranks.
SHARDING = tfdml.Sharding(embeddings=True, min_embedding_bytes=16 << 10)
STRATEGIES = {
    "parameter_server": lambda: tfdml.ParameterServerStrategy(variable_partitioner=PARTS),
    "horovod": tfdml.HorovodStrategy,
    "multi_worker": tfdml.MultiWorkerMirroredStrategy,
    "mirrored": tfdml.MirroredStrategy,
}
OPTIMIZERS = {
    "row_wise_adagrad": lambda: tfdml.optimizers.RowWiseAdagrad(0.05),
    "lazy_adam": lambda: tfdml.optimizers.LazyAdam(0.01),
}
TASTES = 4


def build_model(users: int, items: int, width: int) -> keras.Model:
    """Builds the network: an embedding of users, one of items, and layers above both.

    Args:
        users: Rows of the users' table.
        items: Rows of the items' table.
        width: Width of a row.
    """
    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((), dtype="int32", name="item")
    rows = [
        keras.layers.Embedding(users, width, name="users")(user),
        keras.layers.Embedding(items, width, name="items")(item),
    ]
    hidden = keras.layers.Concatenate()([*rows, keras.layers.Multiply()(rows)])
    hidden = keras.layers.Dense(32, activation="relu")(hidden)
    return keras.Model([user, item], keras.layers.Dense(1, activation="sigmoid")(hidden))


def impressions(users: int, items: int, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns endless batches of users, items, and whether the user liked the item.

    Args:
        users: Number of users.
        items: Number of items.
        batch_size: Rows of a global batch.
        seed: Seed of the samples; tastes are the same for every seed.
    """

    def tastes(ids: tf.Tensor, kind: float) -> tf.Tensor:
        angles = tf.cast(ids, tf.float32)[:, None] * (1.0 + tf.range(TASTES, dtype=tf.float32))
        return tf.sin(angles * kind)

    def draw(number: tf.Tensor, stream: int, most: int) -> tf.Tensor:
        seeds = tf.stack([number, tf.constant(seed + stream, tf.int64)])
        return tf.random.stateless_uniform([batch_size], seeds, 0, most, tf.int32)

    def batch(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        user, item = draw(number, 0, users), draw(number, 1, items)
        likes = tf.reduce_sum(tastes(user, 0.7) * tastes(item, 1.7), 1) > 0
        return {"user": user, "item": item}, tf.cast(likes, tf.float32)[:, None]

    numbers = tf.data.Dataset.range(1 << 40)
    return numbers.map(batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def main(
    strategy: Annotated[
        str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")
    ] = "parameter_server",
    optimizer: Annotated[
        str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")
    ] = "row_wise_adagrad",
    sharding: Annotated[
        bool, typer.Option("--sharding", help="Divide tables among the ranks.")
    ] = False,
    users: Annotated[int, typer.Option(min=1, help="Rows of the users' table.")] = 1000,
    items: Annotated[int, typer.Option(min=1, help="Rows of the items' table.")] = 500,
    width: Annotated[int, typer.Option(min=1, help="Numbers in a row of a table.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="The global batch.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of `--steps` batches.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Batches of an epoch.")] = 200,
    result: Annotated[Path | None, typer.Option(help="A file for the numbers, as JSON.")] = None,
) -> None:
    """Train the recommender, and say what it reached and how fast."""
    if strategy not in STRATEGIES:
        raise typer.BadParameter(f"`--strategy` must be one of {', '.join(STRATEGIES)}.")
    if optimizer not in OPTIMIZERS:
        raise typer.BadParameter(f"`--optimizer` must be one of {', '.join(OPTIMIZERS)}.")
    if sharding and strategy not in ("horovod", "multi_worker"):
        raise typer.BadParameter("`--sharding` needs `--strategy horovod` or `multi_worker`.")
    keras.utils.set_random_seed(1)
    # The only line that differs.
    chosen = STRATEGIES[strategy](**({"sharding": SHARDING} if sharding else {}))
    with chosen.scope():
        model = build_model(users, items, width)
        model.compile(OPTIMIZERS[optimizer](), "binary_crossentropy", metrics=["accuracy"])
    began = time.perf_counter()
    history = model.fit(
        impressions(users, items, batch_size, seed=0),
        epochs=epochs,
        steps_per_epoch=steps,
        verbose=0,
    ).history
    seconds = time.perf_counter() - began
    test = impressions(users, items, batch_size, seed=100)
    _, accuracy = model.evaluate(test, steps=20, verbose=0)
    if not chosen.is_chief:
        return
    if hasattr(chosen, "placement"):
        typer.echo(chosen.placement)
    rate = epochs * steps * batch_size / seconds
    typer.echo(f"{strategy}: test accuracy {accuracy:.3f}, {rate:,.0f} samples/s with the start")
    if result is not None:
        numbers = {"loss": history["loss"], "accuracy": accuracy, "seconds": seconds}
        result.write_text(json.dumps(numbers))


if __name__ == "__main__":
    typer.run(main)
