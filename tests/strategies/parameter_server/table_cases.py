"""Cases run by a chief: checkpoints of tables whose rows servers save and load."""

import gc
import threading
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness.memory import peak
from tests.strategies.parameter_server.cases import _raised
from tests.strategies.parameter_server.fault_cases import Marks
from tests.strategies.parameter_server.partition_cases import _model, _samples, _state, _strategy
from tfdml.callbacks.checkpoint.directory_use import leave_directory
from tfdml.strategies import ParameterServerStrategy


def _fitted(model: keras.Model, directory: str, epochs: int = 1, **options) -> dict:
    """Trains with checkpoints, or resumes as a program that is started again."""
    leave_directory(directory)
    ids, target = _samples()
    callbacks = [tfdml.callbacks.FaultTolerantCheckpoint(directory, **options)]
    model.fit(
        ids, target, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    leave_directory(directory)
    return _state(model)


def trained(directory: str, partitioned: bool, epochs: int = 1) -> dict:
    """Trains a recommender from the directory's newest checkpoint on, or from scratch."""
    return _fitted(_model(_strategy(partitioned)), directory, epochs)


def changed_while_saved(directory: str) -> bool:
    """Returns whether a checkpoint has values of later steps, which change the table meanwhile."""
    model = _model(_strategy(True))
    ids, target = _samples()
    after: list[np.ndarray] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: after.append(model.layers[0]._embeddings.numpy())
    )
    saved = tfdml.callbacks.FaultTolerantCheckpoint(directory, save_freq=1, max_to_keep=0)
    model.fit(ids, target, batch_size=2, shuffle=False, verbose=0, callbacks=[note, saved])
    leave_directory(directory)
    files = tfdml.checkpointing.Files()
    wrong = 0
    for path, value in zip(sorted(Path(directory).glob("fit-*")), after, strict=False):
        checkpoint = tfdml.checkpointing.Checkpoint(
            files, str(path), tfdml.checkpointing.verify(files, str(path))
        )
        wrong += checkpoint.tables()["model/0"][:].tobytes() != value.tobytes()
    return wrong > 0


def _large_model(strategy, rows: int) -> keras.Model:
    with strategy.scope():
        table = layers.Embedding(rows, 64)
        model = keras.Sequential([layers.Input((3,)), table, layers.Flatten(), layers.Dense(1)])
        model.compile(tfdml.optimizers.LazyAdam(0.1), "mse")
    return model


def _rows(megabytes: int) -> int:
    """Returns the number of rows of a table with rows of 256 bytes."""
    return megabytes * 2**20 // 256


def memory_of_checkpoints(directory: str, megabytes: int) -> dict[str, float]:
    """Returns by how much a table moves the chief's peak of memory, in MB, from birth to restart.

    The optimizer has two slots of the table's size.
    """
    in_four = tf.distribute.experimental.partitioners.MinSizePartitioner(1024, max_shards=4)
    strategy = ParameterServerStrategy(variable_partitioner=in_four)
    rng = np.random.default_rng(0)

    def use(name: str, rows: int) -> list[np.ndarray]:
        """Makes, trains and restores a model of a table; returns some predictions."""
        ids = rng.integers(0, rows, (64, 3))
        target = np.ones((64, 1), "float32")
        found = []
        for _ in range(2):  # The second model gets what the first has saved, and is not trained.
            model = _large_model(strategy, rows)
            saved = tfdml.callbacks.FaultTolerantCheckpoint(f"{directory}/{name}", max_to_keep=1)
            model.fit(ids, target, batch_size=32, verbose=0, callbacks=[saved])
            model.evaluate(ids, target, batch_size=32, verbose=0)
            found.append(model.predict(ids, batch_size=32, verbose=0))
            leave_directory(f"{directory}/{name}")
        return found

    use("small", 1000)  # What is imported, and allocated once.
    peak()
    before = peak()
    first, second = use("large", _rows(megabytes))
    return {"peak": peak() - before, "differ": float(np.abs(first - second).max())}


def saved_in_large_parts(
    directory: str, megabytes: int, on_write_error: str, restart_limit: float = 0.0
) -> dict[str, list]:
    """Trains while the test hinders a server that writes.

    Returns:
        The numbers of the steps, and the names of unfinished checkpoints when training went on
        after a loss.
    """
    model = _large_model(_strategy_of_two(restart_limit), _rows(megabytes))
    ids = np.zeros((4, 3), "int32")
    data = tf.data.Dataset.from_tensors((ids, np.ones((4, 1), "float32"))).repeat()
    checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(
        f"{directory}/run", save_freq=20, on_write_error=on_write_error
    )
    steps: list[int] = []
    unfinished: list[str] = []

    def note(batch, logs):
        if steps and batch <= steps[-1]:
            unfinished.extend(path.name for path in Path(directory, "run").glob("partial-*"))
        steps.append(batch)

    noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    callbacks = [checkpoint, Marks(directory, (30,)), noting]
    try:
        model.fit(data, steps_per_epoch=60, verbose=0, callbacks=callbacks)
    finally:
        writers = [t for t in threading.enumerate() if t.name == "tfdml-checkpoint"]
        for writer in writers:
            writer.join(30)
        if any(writer.is_alive() for writer in writers):
            print("a lost server is still waited for", flush=True)
    leave_directory(f"{directory}/run")
    return {"steps": steps, "unfinished": unfinished}


def _strategy_of_two(restart_limit: float = 0.0) -> ParameterServerStrategy:
    in_two = tf.distribute.experimental.partitioners.MinSizePartitioner(1024, max_shards=2)
    return ParameterServerStrategy(
        synchronous=True, variable_partitioner=in_two, restart_limit=restart_limit
    )


def through_a_loss(directory: str, megabytes: int) -> dict[str, float]:
    """Makes, trains, evaluates and exports a large table while the test kills one of its servers.

    Returns:
        By how much the table moved the chief's peak of memory, in MB; the number of steps taken;
        the optimizer's count of them; and the difference of the exported model's predictions.
    """
    strategy = _strategy_of_two(restart_limit=60.0)
    rng = np.random.default_rng(0)

    def use(name: str, rows: int) -> dict[str, float]:
        model = _large_model(strategy, rows)
        ids, target = rng.integers(0, rows, (64, 3)), np.ones((64, 1), "float32")
        data = tf.data.Dataset.from_tensors((ids, target)).repeat()
        seen: list[int] = []
        callbacks = [
            tfdml.callbacks.FaultTolerantCheckpoint(f"{directory}/{name}", save_freq=20),
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(1)),
            Marks(directory, (30,) if name == "large" else ()),
        ]
        model.fit(data, steps_per_epoch=60, verbose=0, callbacks=callbacks)
        model.evaluate(ids, target, verbose=0)
        expected = model.predict(ids, verbose=0)
        model.export(f"{directory}/{name}.model", verbose=False)
        largest = peak()  # A process that loads the model has the table.
        loaded = tf.saved_model.load(f"{directory}/{name}.model")
        served = loaded.serve(tf.constant(ids, tf.float32))
        return {
            "peak": largest,
            "steps": len(seen),
            "iterations": int(model.optimizer.iterations.numpy()),
            "differ": float(np.abs(served - expected).max()),
        }

    use("small", 1000)  # What is imported, and allocated once.
    keras.backend.clear_session()
    gc.collect()  # A variable that no checkpoint has would end the large one.
    peak()
    before = peak()
    result = use("large", _rows(megabytes))
    return {**result, "peak": result["peak"] - before}


def exported(directory: str, megabytes: int) -> dict[str, float]:
    """Exports a model with a large table; returns the difference of its predictions, and memory."""
    model = _large_model(_strategy_of_two(), _rows(megabytes))
    ids = np.random.default_rng(0).integers(0, _rows(megabytes), (64, 3)).astype("float32")
    expected = model.predict(ids, verbose=0)
    small = _large_model(_strategy_of_two(), 1000)
    small.predict(ids % 1000, verbose=0)
    small.export(f"{directory}/small", verbose=False)  # What is imported, and allocated once.
    peak()
    before = peak()
    model.export(f"{directory}/large", verbose=False)
    growth = peak() - before
    loaded = tf.saved_model.load(f"{directory}/large")
    served = loaded.serve(tf.constant(ids))
    return {"peak": growth, "differ": float(np.abs(served - expected).max())}


def refused(directory: str, way: str) -> str:
    """Returns the error of a way to save that is not for partitioned variables."""
    model = _model(_strategy(True))
    model.predict(_samples()[0], verbose=0)
    if way == "restore":
        with tf.distribute.get_strategy().scope():
            plain = tf.train.Checkpoint(model=_model(tf.distribute.get_strategy()))
        plain.write(f"{directory}/plain")
    ways = {
        "restore": lambda: tf.train.Checkpoint(model=model).read(f"{directory}/plain"),
        "checkpoint": lambda: tf.train.Checkpoint(model=model).write(f"{directory}/weights"),
        "saved model": lambda: tf.saved_model.save(model, f"{directory}/model"),
        "export": lambda: model.export(f"{directory}/model"),
    }
    return _raised(ways[way])
