"""Cases run by ranks: trainings with local updates, and their results."""

import os
import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import CLASSES, data
from tests.strategies.local_updates.oracle import played
from tests.strategies.start.start_cases import forget_seeds
from tfdml.callbacks.checkpoint.directory_use import leave_directory
from tfdml.local_updates import DiLoCo, LocalSGD
from tfdml.row_split import LocalReplicas
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.fit import balanced_split

# Of the last batch, of 1 row, one of two ranks has none.
ROWS, BATCH, EPOCHS = 49, 8, 2
STEPS = -(-ROWS // BATCH)

OPTIMIZERS = {
    "sgd": lambda **o: keras.optimizers.SGD(0.1, **o),
    "momentum": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, **o),
    "nesterov": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **o),
    "adam": lambda **o: keras.optimizers.Adam(0.01, **o),
    "plain": lambda **o: keras.optimizers.SGD(**o),
    "lamb": lambda **o: tfdml.optimizers.LAMB(0.01, **o),
}


def loss_of(labels: Any, logits: Any) -> Any:
    """Returns the mean loss of a batch, with a regulariser for none of the weights."""
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return crossentropy(labels, logits)


def make_model(statistics: bool = False, synchronized: bool = False) -> keras.Model:
    """A model with weights that are the same in each job."""
    keras.utils.set_random_seed(11)
    normalized = [layers.BatchNormalization(synchronized=synchronized)] if statistics else []
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(40, activation="tanh"),
            *normalized,
            layers.Dense(40, activation="tanh"),
            layers.Dense(CLASSES),
        ]
    )


def method_of(local_updates: Any) -> Any:
    """Returns the argument `local_updates` from its class's name and arguments."""
    if local_updates is None:
        return None
    name, options = local_updates
    outer = options.get("outer_optimizer")
    if isinstance(outer, str):
        options = {**options, "outer_optimizer": OUTER[outer]}
    return {"LocalSGD": LocalSGD, "DiLoCo": DiLoCo}[name](**options)


# Serialized, because a `MultiWorkerMirroredStrategy` must be there before an optimizer is made.
OUTER = {
    "plain": {"class_name": "SGD", "config": {"learning_rate": 1.0}},
    "half": {"class_name": "SGD", "config": {"learning_rate": 0.5}},
    "nesterov": {
        "class_name": "SGD",
        "config": {"learning_rate": 1.0, "momentum": 0.9, "nesterov": True},
    },
    "adam": {"class_name": "Adam", "config": {"learning_rate": 0.01}},
}


class Dtype:
    """Context manager: layers compute in a dtype; with float64, losses and metrics do, too."""

    def __init__(self, policy: str):
        self._policy = policy

    def __enter__(self) -> None:
        self._before = keras.config.dtype_policy(), keras.config.floatx()
        keras.config.set_dtype_policy(self._policy)
        keras.config.set_floatx("float64" if self._policy == "float64" else "float32")

    def __exit__(self, *error: Any) -> None:
        policy, floatx = self._before
        keras.config.set_dtype_policy(policy)
        keras.config.set_floatx(floatx)


def trained(
    local_updates: Any,
    optimizer: str = "sgd",
    dtype: str = "float64",
    devices: int = 1,
    rows: int = ROWS,
    batch: int = BATCH,
    epochs: int = EPOCHS,
    same_rows: bool = False,
    statistics: bool = False,
    synchronized: bool = False,
    compile_options: dict | None = None,
    optimizer_options: dict | None = None,
    strategy_options: dict | None = None,
    validates: bool = False,
    own_data: bool = False,
    fits: int = 1,
    callbacks: Any = (),
) -> dict[str, Any]:
    """Trains; returns weights, logs, slots, and what the session knows.

    Args:
        local_updates: Name of the method's class and its arguments; None for synchronous steps.
        optimizer: Name of the optimizer.
        dtype: Dtype policy of the layers.
        devices: Replicas of each process.
        rows: Number of rows of the data.
        batch: Rows of a global batch.
        epochs: Number of epochs.
        same_rows: Whether all ranks get the same rows: those of one process with smaller batches.
        statistics: Whether the model has moving statistics.
        synchronized: Whether these are of the rows of all replicas of a step.
        compile_options: Options of `compile`.
        optimizer_options: Options of the optimizer.
        strategy_options: Options of the strategy.
        validates: Whether an epoch ends with a validation.
        own_data: Whether each rank reads its own part of the data, and knows its length late.
        fits: Number of calls of `fit`, of `epochs` each.
        callbacks: Callbacks.
    """
    with Dtype(dtype):
        strategy = rank_job.strategy(
            devices, local_updates=method_of(local_updates), **(strategy_options or {})
        )
        with strategy.scope():
            model = make_model(statistics, synchronized)
            inner = OPTIMIZERS[optimizer](**(optimizer_options or {}))
            model.compile(inner, loss_of, metrics=["accuracy"], **(compile_options or {}))
        x, y = data(rows)
        if same_rows:
            own = batch // strategy.size
            parts = [np.arange(i, i + own) for i in range(0, rows, own)]
            order = np.concatenate([part for part in parts for _ in range(strategy.size)])
            x, y = x[order], y[order]
        counted = CountedRows()
        options: dict[str, Any] = {"epochs": epochs, "verbose": 0}
        options["callbacks"] = [*callbacks, counted]
        if validates:
            options["validation_data"] = (x[:20], y[:20])
        if own_data:
            options["x"] = _own_part(x, y, strategy)
        else:
            options |= {"x": x, "y": y, "batch_size": batch, "shuffle": False}
        for _ in range(fits):
            history = model.fit(**options)
        return outcome(model, history, counted.rows)


class CountedRows(keras.callbacks.Callback):
    """Callback that reads, before each epoch's validation, how many rows the loss has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[float] = []

    def get_state(self) -> None:
        """Returns no state for a checkpoint."""

    def set_state(self, state) -> None:
        """Has no state."""

    def on_test_begin(self, logs=None):
        """Reads the count."""
        (loss,) = (m for m in self.model.metrics if m.name == "loss")
        self.rows.append(float(loss.count))

    def on_epoch_end(self, epoch, logs=None):
        """Reads the count, if there was no validation."""
        if len(self.rows) == epoch:
            self.on_test_begin()


def outcome(
    model: keras.Model, history: keras.callbacks.History, rows_seen: list[float]
) -> dict[str, Any]:
    """Returns what a training has made of a model on this rank."""
    return {
        "weights": [v.numpy() for v in model.weights],
        "history": {k: np.array(v) for k, v in history.history.items()},
        "slots": [v.numpy() for v in model.optimizer.variables],
        "rows_seen": np.array(rows_seen),
    }


def _own_part(x: np.ndarray, y: np.ndarray, strategy: tf.distribute.Strategy) -> tf.data.Dataset:
    rank, size = strategy.rank, strategy.size
    # Rank 0 has more rows than the others.
    edges = [0, *(len(x) * (r + 2) // (size + 1) for r in range(size))]
    own = slice(edges[rank], edges[rank + 1])
    dataset = tf.data.Dataset.from_tensor_slices((x[own], y[own]))
    # A filter hides the number of rows.
    dataset = dataset.filter(lambda *_: True).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def played_in_turn(
    ranks: int,
    optimizer: str,
    outer: str,
    sync_every: int,
    parts: Sequence[tuple[int, ...] | None] = (None,) * EPOCHS,
    optimizer_options: dict | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Returns the weights that one process computes that plays all ranks.

    Args:
        ranks: The number of ranks.
        optimizer: Name of the inner optimizer.
        outer: Name of the outer optimizer.
        sync_every: Steps between synchronizations.
        parts: For each epoch, the weights of the ranks' parts of batches; None for equal ones.
        optimizer_options: Options of the inner optimizer.
        **options: Other arguments of `played`.
    """
    with Dtype("float64"):
        model = make_model()
        x, y = data(ROWS)
        batches = []
        for weights in parts:
            splits = [LocalReplicas(r, 1, ranks, weights) for r in range(ranks)]
            for begin in range(0, ROWS, BATCH):
                end = min(begin + BATCH, ROWS)
                edges = [begin + split.bounds(end - begin) for split in splits]
                batches.append([(x[a:b], y[a:b]) for a, b in edges])
        inner = OPTIMIZERS[optimizer](**(optimizer_options or {}))
        make_outer = lambda: keras.optimizers.get(OUTER[outer])  # noqa: E731
        return played(model, inner, make_outer, loss_of, batches, sync_every, STEPS, **options)


def part_alone(ranks: int, rank: int, optimizer: str) -> list[np.ndarray]:
    """Returns the weights of a job of one process on a rank's rows, in plain Keras."""
    with Dtype("float64"):
        model = make_model()
        model.compile(OPTIMIZERS[optimizer](), loss_of)
        x, y = data(ROWS - 1)
        split = LocalReplicas(rank, 1, ranks)
        for begin in range(0, ROWS - 1, BATCH):
            first, end = begin + split.bounds(BATCH)
            model.train_on_batch(x[first:end], y[first:end])
        return [v.numpy() for v in model.weights]


def statistics_alone(ranks: int) -> list[np.ndarray]:
    """Returns the means, by rows, of the moving statistics that ranks get from their own rows."""
    totals: list[np.ndarray] = []
    with Dtype("float64"):
        x, _ = data(ROWS)
        for rank in range(ranks):
            model, split, rows = make_model(statistics=True), LocalReplicas(rank, 1, ranks), 0
            for begin in range(0, ROWS, BATCH):
                first, end = begin + split.bounds(min(BATCH, ROWS - begin))
                if end > first:
                    model(x[first:end], training=True)
                rows += int(end - first)
            own = [v.numpy() * (rows / ROWS) for v in model.non_trainable_variables]
            totals = [a + b for a, b in zip(totals, own, strict=True)] if totals else own
    return totals


class Recorder(keras.callbacks.Callback):
    """Callback that records weights and metrics after each step, on its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[list[np.ndarray]] = []
        self.synchronized: list[bool] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        """Records the weights and the loss."""
        self.losses.append(float(logs["loss"]))
        self.weights.append([v.numpy() for v in self.model.weights])
        self.synchronized.append(get_session(self.model).rounds.synchronized)


def recorded(local_updates: Any, **options: Any) -> dict[str, Any]:
    """Trains; returns the weights after each step, too."""
    recorder = Recorder()
    result = trained(local_updates, callbacks=[recorder], **options)
    found = {"steps": recorder.weights, "losses": recorder.losses}
    return {**result, **found, "synchronized": recorder.synchronized}


def refused(strategy_options: dict, how: str = "arrays") -> str:
    """Returns the error of a strategy's constructor, or of `fit`."""
    options = {
        name: method_of(value) if name == "local_updates" else value
        for name, value in strategy_options.items()
    }
    try:
        strategy = rank_job.strategy(**options)
        with strategy.scope():
            model = make_model()
            model.compile("sgd", loss_of)
        x, y = data(ROWS)
        if how == "generator":
            model.fit(((x[:8], y[:8]) for _ in range(4)), steps_per_epoch=4, verbose=0)
        elif how == "unseeded":
            forget_seeds()
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(49).batch(8)
            model.fit(dataset, verbose=0)
        elif how == "noise_scale":
            scale = tfdml.callbacks.GradientNoiseScale()
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[scale])
        else:
            model.fit(x, y, batch_size=8, verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def resumed(
    directory: str,
    local_updates: Any,
    stop_after: int | None = None,
    optimizer: str = "adam",
    save_freq: int | str = 1,
    callbacks: Any = (),
    on_change: str = "error",
    **options: Any,
) -> dict[str, Any]:
    """Trains from the last checkpoint, if there is one; may end in the midst of an epoch.

    A training that ends because of a preemption returns its exit code.

    Args:
        directory: Directory of the checkpoints.
        local_updates: As in `trained`.
        stop_after: Number of steps after which the training fails on all ranks; None to go on.
        optimizer: Name of the optimizer.
        save_freq: Steps between checkpoints.
        callbacks: Other callbacks.
        on_change: Argument of the checkpoint callback.
        **options: Other arguments of `trained`.
    """
    checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(
        directory, save_freq=save_freq, asynchronous=False, on_change=on_change
    )
    try:
        return trained(
            local_updates,
            optimizer,
            callbacks=[checkpoint, Ending(stop_after), *callbacks],
            **options,
        )
    except Ended:
        return {}
    except SystemExit as left:
        return {"code": left.code}
    finally:
        # The next job is another program.
        leave_directory(directory)


class Ended(Exception):
    """End of a training in the midst of an epoch."""


class Ending(keras.callbacks.Callback):
    """Callback that ends a training after some steps.

    Args:
        steps: The number of steps; None for all.
    """

    def __init__(self, steps: int | None):
        super().__init__()
        self._left = steps or 0

    def get_state(self) -> None:
        """Returns no state for a checkpoint."""

    def set_state(self, state) -> None:
        """Has no state."""

    def on_train_batch_end(self, batch, logs=None):
        """Counts the steps."""
        self._left -= 1
        if not self._left:
            raise Ended


class Preempted(keras.callbacks.Callback):
    """Callback by which SIGTERM reaches one rank, once.

    Args:
        rank: The rank.
        step: The step of all epochs after which the signal comes, from 1.
    """

    def __init__(self, rank: int, step: int):
        super().__init__()
        self._left = step if rank == rank_job.rank() else 0

    def get_state(self) -> None:
        """Returns no state for a checkpoint."""

    def set_state(self, state) -> None:
        """Has no state."""

    def on_train_batch_end(self, batch, logs=None):
        """Counts the steps."""
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(directory: str, local_updates: Any, rank: int, step: int) -> dict[str, Any]:
    """Trains, saving at ends of epochs alone, until SIGTERM after a step of one rank."""
    callbacks = [Preempted(rank, step)]
    return resumed(directory, local_updates, save_freq="epoch", callbacks=callbacks)


def with_measured_parts(local_updates: Any) -> dict[str, Any]:
    """Trains with parts of batches that change whatever the measured times; returns them, too."""

    def planned(rows: np.ndarray, seconds: np.ndarray) -> tuple[int, ...]:
        assert (seconds > 0).all(), seconds
        return (3, 1) if rows[0] <= rows[1] else (1, 3)

    parts = []

    class Parts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            parts.append(self.model.distribute_strategy.batch_weights)

    with mock.patch.object(balanced_split, "balanced", planned):
        options = {"strategy_options": {"batch_split": "auto"}, "epochs": 3}
        result = trained(local_updates, "adam", callbacks=[Parts()], **options)
    return {**result, "parts": [tuple(weights) for weights in parts]}
