"""Cases run by ranks: data read on each rank from Python or as own shards, and invalid data."""

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

from tests.harness import rank_job
from tests.strategies.cases import compiled, data, dense_model, outcome, seed_ranks_apart


class Noted(keras.utils.PyDataset):
    """Trains on batches whose order each rank draws for itself."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y
        self.order = np.random.default_rng(rank_job.rank()).permutation(len(x))

    def __len__(self):
        return -(-len(self.x) // 16)

    def __getitem__(self, index):
        rows = self.order[index * 16 : (index + 1) * 16]
        return self.x[rows], self.y[rows]


def caught() -> dict:
    """A step that fails on all ranks is caught, and training continues."""
    rank = rank_job.rank()
    x, y = data(48)
    model = compiled(rank_job.strategy(), optimizer="adam")

    def differently(x, y):
        return x + tf.reshape(tf.numpy_function(lambda: np.float32(rank), [], "float32"), []), y

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"^Batches must be the same on all"):
        model.fit(dataset.map(differently), verbose=0)
    return outcome(model, model.fit(dataset, epochs=2, verbose=0))


class Endless(keras.utils.PyDataset):
    """Trains on endless batches whose order restarts in each epoch."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        rows = np.arange(index * 13, (index + 1) * 13) % len(self.x)
        return self.x[rows], self.y[rows] if rank_job.rank() == 0 else 0 * self.y[rows]


def python_data(kind: str) -> dict:
    """Trains on data that only rank 0 reads: each rank would read different rows."""
    seed_ranks_apart()
    x, y = data(50)
    model = compiled(rank_job.strategy())
    if kind == "PyDataset":
        source, options = Noted(x, y), {}
    elif kind == "endless PyDataset with workers":
        source, options = Endless(x, y, workers=2, max_queue_size=2), {"steps_per_epoch": 4}
    elif kind == "PyDataset with workers":
        source, options = Noted(x, y, workers=2, max_queue_size=2), {}
    else:
        rng = np.random.default_rng(rank_job.rank())
        batches = ((x[rows], y[rows]) for _ in range(100) for rows in [rng.integers(0, len(x), 13)])
        source, options = batches, {"steps_per_epoch": 4}
    history = model.fit(source, epochs=3, verbose=0, **options)
    return outcome(model, history)


def tables(labels: str = "column") -> dict:
    """Trains on pandas data frames; labels as a "column" or a "table"."""
    x, y = data(37)
    table = pandas.DataFrame(x, columns=list("abcdef"))
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    y = pandas.Series(y, name="y")
    if labels == "table":
        y = y.to_frame()
    history = model.fit(
        table, y, batch_size=8, epochs=2, verbose=0, validation_data=(table[:9], y[:9])
    )
    model.train_on_batch(table[:5], y[:5])
    result = {**outcome(model, history), "predicted": model.predict(table, verbose=0)}
    result["evaluated"] = model.evaluate(table, y, verbose=0)
    model.fit(table, y, batch_size=8, validation_split=0.2, shuffle=False, verbose=0)
    return {**result, **outcome(model)}


def sharded_input(epochs: int = 2) -> dict:
    """Each rank reads its own rows; the ranks' numbers of batches differ."""
    strategy = rank_job.strategy()
    x, y = data(45)
    begin, end = (0, 45) if strategy.size == 1 else ((0, 30), (30, 45))[strategy.rank]
    if strategy.size == 1:  # The global batches that two ranks form from their shards.
        order = [
            *range(0, 6), *range(30, 36), *range(6, 12), *range(36, 42), *range(12, 18),
            *range(42, 45),
        ]  # fmt: skip
        rows = [order[:12], order[12:24], order[24:], range(18, 24), range(24, 30)]
        batches = [(x[list(r)], y[list(r)]) for r in rows]
        signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(5))
    else:
        dataset = tf.data.Dataset.from_tensor_slices((x[begin:end], y[begin:end])).batch(12)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = dataset.with_options(options)
    model = compiled(strategy)
    history = model.fit(dataset, epochs=epochs, verbose=0)
    return outcome(model, history)


def wrong_data(kind: str) -> None:
    """Passes inconsistent data; must raise on every rank."""
    strategy = rank_job.strategy()
    x, y = data(48)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    rank = strategy.rank
    if kind == "other bits":

        def differently(x, y):
            noise = tf.numpy_function(lambda: np.float32(rank), [], "float32")
            return x + tf.reshape(noise, []), y

        dataset = dataset.map(differently)
    elif kind == "fewer batches":
        dataset = dataset.take(4 - rank).filter(lambda x, y: True)
    elif kind == "an error":

        def batches():
            for begin in (0, 12, 24):  # Keras prefetches two batches.
                yield x[begin : begin + 12], y[begin : begin + 12]
            if rank == 0:
                raise OSError("the file is gone")
            yield x[36:], y[36:]

        compiled(strategy).fit(batches(), steps_per_epoch=4, verbose=0)
    elif kind == "no part":
        dataset = dataset.skip(4 * rank)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = dataset.with_options(options)
    compiled(strategy).fit(dataset, verbose=0)
