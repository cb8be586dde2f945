"""Cases run by ranks: training with checkpoints that can be interrupted at any point."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.checkpointing import stores  # noqa: F401 (registers the stores)
from tests.harness import rank_job
from tfdml.callbacks.checkpoint.directory_use import leave_directory, use_directory
from tfdml.checkpointing import Files, open_files

SAMPLES, BATCH = 40, 8
STEPS = SAMPLES // BATCH


class Signalling(Files):
    """Sends this process a signal at one of its file operations and at each later one."""

    def __init__(self, at: int, number: int):
        self._left, self._number = at, number

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), self._number)


for _name in (
    "make_directory", "create", "write", "sync", "sync_directory", "rename", "unlink",
    "remove_directory",
):  # fmt: skip

    def _counted(self, *args, _name=_name):
        self._count()
        return getattr(Files, _name)(self, *args)

    setattr(Signalling, _name, _counted)


class Draws(keras.callbacks.Callback):
    """Records random numbers and logs of every batch; sends this process a signal at a step."""

    def __init__(self, at: int | None, number: int | Callable[[], None], rank: int | None):
        super().__init__()
        self.numbers: list[float] = []
        self.losses: list[float] = []
        self.batches: list[int] = []
        self.at, self.number, self.rank = at, number, rank

    def on_train_begin(self, logs=None):
        if self.at == 0:
            os.kill(os.getpid(), self.number)

    def on_train_batch_end(self, batch, logs=None):
        own = keras.random.uniform([])
        self.numbers.append(random.random() + np.random.rand() + float(own))
        self.losses.append(float(logs["loss"]))
        self.batches.append(batch)
        if self.at == len(self.losses) and self.rank in (None, rank_job.rank()):
            if self.number == signal.SIGKILL:
                time.sleep(0.05)  # The write may then be partly done, finished, or not begun.
            if callable(self.number):
                self.number()
            else:
                os.kill(os.getpid(), self.number)


def made(optimizer: str) -> keras.Optimizer:
    """Returns a new optimizer."""
    return {
        "adam": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
        "slow adam": lambda: keras.optimizers.Adam(0.001, use_ema=True, ema_momentum=0.9),
        "scaled": lambda: tfdml.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=8, dynamic_growth_steps=3
        ),
        "accumulating": lambda: keras.optimizers.SGD(
            0.01, momentum=0.9, gradient_accumulation_steps=3
        ),
        "schedule": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.1, 15), momentum=0.9
        ),
    }[optimizer]()


def model(optimizer: str = "adam", width: int = 8) -> keras.Model:
    built = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
    )
    built.compile(made(optimizer), "mse", metrics=["mae", keras.metrics.CosineSimilarity()])
    return built


def numbers(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(7)
    x = made.normal(size=(samples, 6)).astype("float32")
    return x, made.normal(size=(samples, 3)).astype("float32")


def data(kind: str, ledger: str | None) -> dict:
    """Returns arguments of `fit`."""
    x, y = numbers()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind in ("dataset", "repeated"):
        made = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=3)
        if kind == "dataset":
            return {"x": made.batch(BATCH)}
        return {"x": made.batch(BATCH).repeat(), "steps_per_epoch": 4}
    if kind == "generator":
        rows = tf.data.Dataset.from_generator(
            lambda: zip(x, y, strict=True),
            output_signature=(tf.TensorSpec((6,)), tf.TensorSpec((3,))),
        )
        return {"x": rows.batch(BATCH)}
    return {
        "x": tfdml.data.read_tfrecords(
            kind, BATCH, features=["x"], label="y", seed=5, ledger=ledger
        )
    }


def train(
    directory: str,
    kind: str = "arrays",
    *,
    at: int | None = None,
    number: int | Callable[[], None] = signal.SIGKILL,
    rank: int | None = None,
    operation: int | None = None,
    epochs: int = 3,
    optimizer: str = "adam",
    width: int = 8,
    compression: str | None = None,
    fits: int = 1,
    strategy: bool = False,
    ledger: str | None = None,
    **options,
) -> dict:
    """Trains with a checkpoint, in one process or as a rank; returns the outcome.

    Args:
        directory: Directory of the checkpoints.
        kind: Kind of the data.
        at: Step after which the signal is sent; 0 for before the first step.
        number: Signal number; or a function that is called after that step instead.
        rank: Rank that gets the signal; None for all.
        operation: File operation from which on the signal is sent, at each one.
    """
    keras.utils.set_random_seed(11 + rank_job.rank())
    scope = rank_job.strategy(compression=compression).scope() if strategy else None
    with scope or contextlib.nullcontext():
        built = model(optimizer, width)
        given = data(kind, ledger)
    if operation is not None:
        use_directory(directory).files = Signalling(operation, number)
    code, histories = 0, []
    draws = Draws(at, number, rank)
    try:
        for _ in range(fits):
            checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(
                directory, **{"save_freq": 2, **options}
            )
            callbacks = [
                draws,
                keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
                checkpoint,
                keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.5),
            ]
            if optimizer == "schedule":
                callbacks.pop()
            history = built.fit(
                **given, epochs=epochs, validation_data=numbers(8), verbose=0, callbacks=callbacks
            )
            histories.append((history.history, history.epoch))
    except SystemExit as ended:
        code = ended.code
    finally:
        leave_directory(directory)
    return {
        "code": code,
        "weights": [np.asarray(w).tobytes() for w in built.get_weights()],
        "values": [np.asarray(w) for w in built.get_weights()],
        "slots": [v.numpy().tobytes() for v in built.optimizer.variables],
        "histories": histories,
        "numbers": draws.numbers,
        "losses": draws.losses,
        "batches": draws.batches,
        "trained": int(built.optimizer.iterations.numpy()),
        "saved": [n for n in open_files(directory).names(directory) if n != "lock"],
    }
