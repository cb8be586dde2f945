"""Cases run by ranks: training with unequal parts of each batch."""

import os
import signal
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import CLASSES, compiled, data, outcome, seed_ranks_apart
from tfdml.callbacks.checkpoint.directory_use import leave_directory
from tfdml.strategies.keras_seam.fit import balanced_split

ROWS, BATCH, EPOCHS = 101, 16, 2
SOURCES = ("arrays", "shuffled", "known", "unknown", "repeated", "scattered")


def fitted(
    batch_split: list[float] | str | None,
    source: str,
    devices: int = 1,
    model: str = "dense",
    records: str | None = None,
    ledger: str | None = None,
    compile_options: dict | None = None,
) -> dict:
    """`fit`, `evaluate` and `predict` in float64; the last batches are small.

    Args:
        batch_split: Argument of the strategy.
        source: Kind of data, of `SOURCES`.
        devices: Replicas of each process.
        model: Kind of model.
        records: Directory of the data set for "records".
        ledger: Directory of its ledger.
        compile_options: Options for `compile`.
    """
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = rank_job.strategy(devices, batch_split=batch_split)
    built = compiled(strategy, model, **(compile_options or {}))
    x, y = data(ROWS)
    x = x.astype("float64")
    keras.utils.set_random_seed(11)  # A dataset's seed depends on it.
    if source == "records":
        given, steps = {"x": _records(records, strategy, ledger)}, None
    else:
        given, steps = _source(source, x, y)
    seed_ranks_apart()
    callbacks = [given["x"].callback()] if source == "records" else []
    history = built.fit(
        **given,
        epochs=EPOCHS,
        steps_per_epoch=steps,
        verbose=0,
        validation_data=(x[:33], y[:33]),
        callbacks=callbacks,
    )
    return {
        **outcome(built, history),
        "evaluate": np.array(built.evaluate(x, y, batch_size=BATCH, verbose=0)),
        "predict": built.predict(x, batch_size=BATCH, verbose=0),
    }


def write_records(directory: str) -> None:
    """Writes the rows as TFRecords."""
    x, y = data(ROWS)
    rows = ({"x": a, "y": int(b)} for a, b in zip(x, y, strict=True))
    tfdml.data.write_tfrecords(rows, directory, shards=2)


def _records(directory: str, strategy: tf.distribute.Strategy, ledger: str | None):
    with strategy.scope():
        return tfdml.data.read_tfrecords(
            directory, BATCH, features=["x"], label="y", seed=5, ledger=ledger
        )


def _source(source: str, x: np.ndarray, y: np.ndarray) -> tuple[dict, int | None]:
    """Returns data for `fit`, and the number of steps of an epoch, None for all."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if source in ("arrays", "shuffled"):
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": source == "shuffled"}, None
    if source == "known":
        return {"x": dataset.shuffle(ROWS, seed=5).batch(BATCH)}, None
    if source == "unknown":
        return {"x": dataset.filter(lambda x, y: y < CLASSES).batch(BATCH)}, None
    if source == "repeated":
        return {"x": dataset.repeat().batch(BATCH)}, 5
    if source == "scattered":
        return {"x": _Batches(x, y)}, None
    raise ValueError(f"`source` must be one of {SOURCES}. Received: {source!r}.")


class _Batches(keras.utils.PyDataset):
    """Batches made by Python, which rank 0 sends to the other ranks."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, number: int):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return self._x[rows], self._y[rows]


def workers_of_shares() -> list[dict[int, int]]:
    """Returns the worker that took each share, for each step on synchronous parameter servers."""
    strategy = rank_job.strategy(batch_split=[3, 1])
    model = compiled(strategy)
    x, y = data(32)
    taken: list[dict[int, int]] = []

    def note(batch: int, logs: dict) -> None:
        taken.append(dict(model.train_function.worker_of_share))

    each = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[each])
    return taken


class Paced(keras.layers.Layer):
    """Layer that passes its input on, records how many rows each step has, and takes its time.

    Args:
        seconds_per_row: Time that each row takes.
    """

    def __init__(self, seconds_per_row: float):
        super().__init__()
        self._seconds = seconds_per_row
        self.rows: list[int] = []

    def call(self, inputs, training=False):
        """Returns `inputs`."""
        if not training:
            return inputs
        paced = tf.numpy_function(self._pass, [inputs], inputs.dtype)
        return tf.ensure_shape(paced, inputs.shape)

    def _pass(self, inputs: np.ndarray) -> np.ndarray:
        self.rows.append(len(inputs))
        time.sleep(self._seconds * len(inputs))
        return inputs


def paced(seconds_per_row: list[float], epochs: int, kind: str = "arrays") -> dict:
    """Trains with "auto" where each process takes its own time per row.

    Returns:
        This process's rows in each step, the last parts, and `StepMonitor`'s shares of each epoch.
    """
    strategy = rank_job.strategy(batch_split="auto")
    with strategy.scope():
        layer = Paced(seconds_per_row[strategy.rank])
        model = keras.Sequential([layers.Input((6,)), layer, layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    x, y = data(240)
    monitor = tfdml.callbacks.StepMonitor()
    given = {"x": x, "y": y, "batch_size": 48}
    if kind == "dataset":
        given = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(48)}
    model.fit(**given, epochs=epochs, verbose=0, callbacks=[monitor])
    return {
        "rows": np.reshape(layer.rows, [epochs, 5]).tolist(),
        "weights": strategy.batch_weights,
        "shares": [[times.share for times in epoch] for epoch in monitor.epochs],
    }


def _planned(rows: np.ndarray, seconds: np.ndarray) -> tuple[int, ...]:
    """Returns other parts after each epoch, whatever the times."""
    first = rows[0] / sum(rows)
    return (1, 1) if first < 0.4 else (3, 1) if first < 0.7 else (1, 3)


def lives(
    batch_split: list[float] | str, source: str, directory: str, records: str | None, ends_at: int
) -> tuple[list, list[int] | None]:
    """Trains three epochs of eight steps, interrupted after a step and resumed; 0 for not at all.

    Returns:
        The weights, and the parts of the first epoch after the resumption.
    """
    with mock.patch.object(balanced_split, "balanced", _planned):
        if ends_at:
            assert _life(batch_split, source, directory, records, ends_at) is None
            keras.backend.clear_session()
        return _life(batch_split, source, directory, records)


def _life(
    batch_split: list[float] | str,
    source: str,
    directory: str,
    records: str | None,
    ends_at: int | None = None,
) -> tuple[list, list[int] | None] | None:
    strategy = rank_job.strategy(batch_split=batch_split)
    model = compiled(strategy)
    seen, parts = [], []

    def begin(epoch: int, logs: dict) -> None:
        parts.append(strategy.batch_weights)

    def end(batch: int, logs: dict) -> None:
        seen.append(batch)
        if len(seen) == ends_at:
            os.kill(os.getpid(), signal.SIGTERM)

    watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_end=end)
    x, y = data(96)
    keras.utils.set_random_seed(11)
    if source == "arrays":
        given = {"x": x, "y": y, "batch_size": 12}
    elif source == "dataset":
        pairs = tf.data.Dataset.from_tensor_slices((x, y))
        given = {"x": pairs.shuffle(96, seed=5).batch(12)}
    else:
        with strategy.scope():
            pipeline = tfdml.data.read_tfrecords(records, 12, features=["x"], label="y", seed=5)
        given = {"x": pipeline}
    saved = tfdml.callbacks.FaultTolerantCheckpoint(directory, save_freq=1000)
    code = None
    try:
        model.fit(**given, epochs=3, verbose=0, callbacks=[saved, watch])
    except SystemExit as ended:
        code = ended.code
    finally:
        leave_directory(directory)
    if ends_at is not None:
        assert code == 75
        return None
    return [w.numpy() for w in model.weights], parts[0]


def ended(*case) -> None:
    """Is interrupted in the second epoch, which has other parts than the first."""
    with mock.patch.object(balanced_split, "balanced", _planned):
        assert _life(*case, ends_at=11) is None


def resumed_parts(*case) -> tuple[int, ...]:
    """Resumes; returns the parts of the resumed epoch."""
    with mock.patch.object(balanced_split, "balanced", _planned):
        return _life(*case)[1]


def own_parts_by_speed() -> str:
    """Returns the error for "auto" with a dataset of which each rank has its own part."""
    model = compiled(rank_job.strategy(batch_split="auto"))
    options = tf.data.Options()
    off = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = off
    dataset = tf.data.Dataset.from_tensor_slices(data(32)).batch(16).with_options(options)
    # For validation, the parts need not follow the speeds.
    model.fit(*data(32), batch_size=16, validation_data=dataset, verbose=0)
    try:
        model.fit(dataset, verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def different_parts() -> str:
    """Returns the error for parts that differ between the ranks."""
    model = compiled(rank_job.strategy(batch_split=[3, 1 + rank_job.rank()]))
    try:
        model.fit(*data(32), batch_size=16, verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def traces_with_xla() -> tuple[int, list]:
    """Returns how often a compiled step was traced in three epochs, and the parts of each."""
    strategy = rank_job.strategy(batch_split="auto")
    traces, parts = [], []
    with strategy.scope():

        class Traced(layers.Layer):
            """Layer that counts the traces of its training."""

            def call(self, inputs, training=False):
                """Returns `inputs`."""
                if training:
                    traces.append(1)
                return inputs

        model = keras.Sequential([layers.Input((6,)), Traced(), layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=True)
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: parts.append(strategy.batch_weights)
    )
    x, y = data(96)
    with mock.patch.object(balanced_split, "balanced", _planned):
        model.fit(x, y, batch_size=12, epochs=1, verbose=0, callbacks=[note])
        first = len(traces)
        model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=[note])
    assert np.isfinite(model.get_weights()[0]).all()
    return len(traces) - first + 1, parts
