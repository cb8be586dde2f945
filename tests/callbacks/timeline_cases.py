"""Cases run by ranks: trainings of which some steps are recorded."""

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tfdml.callbacks import FaultTolerantCheckpoint, Timeline
from tfdml.runtime import host_clock
from tfdml.strategies.keras_seam.local_updates.synchronizer import Synchronizer
from tfdml.strategies.replicas.global_step import MetricStep

WIDTH, BATCH = 160, 16
BUCKET_BYTES = 4 * WIDTH * WIDTH  # Each kernel is a bucket of its own.

LOCAL_UPDATES = {
    "LocalSGD": lambda: tfdml.local_updates.LocalSGD(sync_every=3),
    "DiLoCo": lambda: tfdml.local_updates.DiLoCo(sync_every=4, num_fragments=2),
}


def model_in(strategy, optimizer=None, **options) -> keras.Model:
    """Returns a compiled model of three kernels."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        hidden = [layers.Dense(WIDTH, activation="tanh", use_bias=False) for _ in range(2)]
        last = layers.Dense(WIDTH, use_bias=False)
        model = keras.Sequential([layers.Input((WIDTH,)), *hidden, last])
        made = keras.optimizers.SGD(0.05, momentum=0.9, **(optimizer or {}))
        model.compile(made, "mse", **options)
    return model


@contextlib.contextmanager
def clock_shifted(seconds: float) -> Iterator[None]:
    """Context manager: this rank's clock is ahead."""
    host_clock.set_shift(seconds)
    try:
        yield
    finally:
        host_clock.set_shift(0.0)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Context manager: threads of this process want to run Python code all the time."""
    ends = threading.Event()

    def spin() -> None:
        while not ends.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


class Late(keras.callbacks.Callback):
    """Callback in which a rank stays after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        """Waits."""
        if rank_job.rank() == 1:
            time.sleep(0.7)


class Failing(keras.callbacks.Callback):
    """Callback that fails on all ranks after the fifth batch."""

    def on_train_batch_end(self, batch, logs=None):
        """Raises."""
        if batch == 4:
            raise ZeroDivisionError


def train(
    directory: str | None,
    profile_batch=(4, 6),
    steps: int = 8,
    shift: float = 0.0,
    extra: str = "",
    optimizer: dict | None = None,
    compiling: dict | None = None,
    **options,
) -> list[np.ndarray]:
    """Trains an epoch, with a timeline if there is a directory; returns the weights.

    Args:
        directory: Directory of the timeline.
        profile_batch: The batches that are recorded.
        steps: The number of batches.
        shift: Seconds by which rank 1's clock is ahead of rank 0's.
        extra: "busy" if rank 1 is; "late" if it stays in a callback; "failing" if a callback fails;
            "saving" if a checkpoint is saved after each batch; "generator" if the data come from
            one; "sharded" for sharding; "LocalSGD" or "DiLoCo" for local updates; "ring" for one
            group of all devices of all ranks.
        optimizer: Arguments of the optimizer.
        compiling: Arguments of the model's `compile`.
        **options: Arguments of the strategy.
    """
    if extra == "sharded":
        options["sharding"] = tfdml.Sharding(optimizer_state=True)
    if extra == "ring":
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        communication = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        options["communication_options"] = communication
    if extra in LOCAL_UPDATES:
        options["local_updates"] = LOCAL_UPDATES[extra]()
    strategy = rank_job.strategy(bucket_bytes=BUCKET_BYTES, **options)
    model = model_in(strategy, optimizer, **(compiling or {}))
    x = np.random.default_rng(0).normal(size=(BATCH * steps, WIDTH)).astype("float32")
    callbacks = [Timeline(directory, profile_batch)] if directory else []
    if extra in ("late", "failing"):
        callbacks.append({"late": Late, "failing": Failing}[extra]())
    if extra == "saving":
        saves = FaultTolerantCheckpoint(f"{directory}-saves", save_freq=1, asynchronous=True)
        callbacks.append(saves)
    own = strategy.rank == 1
    with contextlib.ExitStack() as stack:
        if own and shift:
            stack.enter_context(clock_shifted(shift))
        if own and extra == "busy":
            stack.enter_context(busy())
        data = (x, x)
        if extra == "generator":
            parts = np.split(x, steps)
            data = (((part, part) for part in parts), None)
        rows = {} if extra == "generator" else {"batch_size": BATCH, "shuffle": False}
        model.fit(*data, **rows, verbose=0, callbacks=callbacks)
    return model.get_weights()


def train_with(settings: dict) -> list[np.ndarray]:
    """Trains with the arguments of `train`."""
    return train(**settings)


def traced(settings: dict) -> list[bool]:
    """Trains; returns for each graph of a train step whether it reads the time.

    Args:
        settings: Arguments of `train`.
    """
    graphs = []
    step = MetricStep.__call__

    def noting(self, batch):
        logs = step(self, batch)
        graphs.append(tf.compat.v1.get_default_graph())
        return logs

    with mock.patch.object(MetricStep, "__call__", noting):
        train(**settings)
    called = [[op.node_def.attr["f"].func.name for op in g.get_operations()] for g in graphs]
    return [any("write_time" in name for name in names) for names in called]


def traced_synchronizations(settings: dict) -> list[tuple[bool, int]]:
    """Trains; returns for each graph of a synchronization whether it notes times, and its step.

    Args:
        settings: Arguments of `train`.
    """
    graphs = []
    exchange = Synchronizer._exchange

    def noting(self, numbers):
        with tf.init_scope():
            step = int(self._model.optimizer.iterations)
        graphs.append((self._extended.recorder.is_in_step, step))
        exchange(self, numbers)

    with mock.patch.object(Synchronizer, "_exchange", noting):
        train(**settings)
    return graphs


def failing_then_training(directory: str) -> list[bool]:
    """Fails within the recorded steps of a `fit`; returns the same as `traced` for another one."""
    try:
        train(directory, extra="failing")
    except ZeroDivisionError:
        return traced({"directory": None})
    raise RuntimeError("The training must fail.")


def evaluating(directory: str) -> int:
    """Trains with a timeline and validation within it; returns the number of its files."""
    model = model_in(rank_job.strategy(bucket_bytes=BUCKET_BYTES))
    x = np.ones((4 * BATCH, WIDTH), "float32")
    model.fit(
        x, x, batch_size=BATCH, epochs=2, verbose=0, validation_data=(x, x),
        callbacks=[Timeline(directory, (3, 6))],
    )  # fmt: skip
    return len(list(Path(directory).glob("rank-*.json")))


def on_servers() -> None:
    """Trains on parameter servers with a timeline; must be refused."""
    model = model_in(tfdml.ParameterServerStrategy())
    x = np.ones((BATCH, WIDTH), "float32")
    model.fit(x, x, batch_size=BATCH, verbose=0, callbacks=[Timeline("nowhere")])


def said_on_one_process(directory: str) -> str:
    """Trains on one process; returns what is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(directory)
    return printed.getvalue()


def clock(shift: float, is_busy: bool) -> tuple[float, float]:
    """Returns the difference from rank 0's clock, and its largest error.

    Args:
        shift: Seconds by which rank 1's clock is ahead.
        is_busy: Whether all ranks are.
    """
    strategy = rank_job.strategy()
    with clock_shifted(shift * strategy.rank), busy() if is_busy else contextlib.nullcontext():
        reading = strategy.extended.guard.read_clock()
    # Rank 0 answers until rank 1 has asked.
    strategy.extended.collective.all_reduce([tf.ones([1])], "clocks_are_read")
    return reading.offset, reading.error
