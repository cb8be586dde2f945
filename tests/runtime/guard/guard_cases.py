"""Cases run by ranks: faults and differences that the guard and the fingerprint must detect."""

import dataclasses
import os
import signal
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import InScope, compiled, data
from tfdml.strategies import HorovodStrategy


def different(what: str) -> None:
    """Rank 1 does something different from rank 0; must raise on both."""
    x, y = data(48)
    strategy = rank_job.strategy()
    own = strategy.rank == 1
    options, arguments = {}, {}
    if what == "optimizer":
        options = {"optimizer": "sgd" if own else "adam"}
    elif what == "momentum":
        options = {"optimizer": InScope(keras.optimizers.SGD, 0.1, 0.5 if own else 0.9)}
    elif what == "epochs":
        arguments = {"epochs": 3 if own else 2}
    elif what == "steps per execution":
        options = {"steps_per_execution": 2 if own else 1}
    with strategy.scope():
        if what == "width":
            model = dense(16 if own else 8)
        elif what == "dtype":
            model = dense(8, "float64" if own else "float32")
        else:
            model = dense(8)
        optimizer = options.pop("optimizer", "sgd")
        optimizer = optimizer() if isinstance(optimizer, InScope) else optimizer
        model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    if what == "call" and own:
        model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=12, verbose=0, **arguments)


def different_options(name: str, own, others) -> None:
    """Rank 1 creates its strategy with a different option; must raise on both."""
    x, y = data(24)
    devices = [["CPU:0", "CPU:1"]] if name == "pipeline" else 1
    strategy = rank_job.strategy(devices, **{name: own if rank_job.rank() == 1 else others})
    compiled(strategy).fit(x, y, batch_size=12, verbose=0)


class OtherBuckets(keras.callbacks.Callback):
    """Rank 1's exchanges differ from rank 0's after the fingerprints have been compared."""

    def on_train_begin(self, logs=None):
        extended = self.model.distribute_strategy.extended
        if extended.collective.rank == 1:
            extended.options = dataclasses.replace(extended.options, bucket_bytes=16)


def unequal_exchanges(again: bool) -> None:
    """The ranks exchange different tensors in a step; with `again`, under names used before."""
    x, y = data(24)
    if again:
        compiled(rank_job.strategy()).fit(x, y, batch_size=12, verbose=0)
    compiled(rank_job.strategy()).fit(x, y, batch_size=12, verbose=0, callbacks=[OtherBuckets()])


def dense(width: int, dtype: str = "float32") -> keras.Model:
    """Returns a model of two layers."""
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(width, dtype=dtype, name="hidden"),
            layers.Dense(5, activation="softmax", name="out"),
        ]
    )


def changed_weights(check_desync: int) -> None:
    """Rank 1 changes a weight after the third step."""
    x, y = data(120)
    strategy = HorovodStrategy(check_desync=check_desync)
    model = compiled(strategy)

    def change(batch, logs):
        if batch == 2 and strategy.rank == 1:
            model.layers[-1].bias.assign_add(tf.ones_like(model.layers[-1].bias))

    model.fit(
        x, y, batch_size=12, verbose=0, shuffle=False,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=change)],
    )  # fmt: skip


class Holding(keras.callbacks.Callback):
    """Rank 1 stays in a callback until rank 0 has heard of it; rank 0 waits for that."""

    def __init__(self, strategy):
        super().__init__()
        self._guard = strategy.extended.guard
        self._rank = strategy.rank
        self.heard = ""

    def on_epoch_end(self, epoch, logs=None):
        deadline = time.monotonic() + 20
        if self._rank == 1:
            time.sleep(4)
        while self._rank == 0 and "Holding" not in self.heard and time.monotonic() < deadline:
            time.sleep(0.05)
            self.heard = self._guard._members[1].describe(time.monotonic())


def in_a_callback() -> tuple[str, str]:
    """Returns what rank 0 knows of rank 1 during a callback, and rank 0's activity afterwards."""
    x, y = data(24)
    strategy = rank_job.strategy()
    model = compiled(strategy)
    holding = Holding(strategy)
    model.fit(x, y, batch_size=12, verbose=0, callbacks=[holding])
    return holding.heard, strategy.extended.guard.activity.describe()


def guard_that_fails() -> None:
    """Rank 1's guard thread raises while the rank itself is healthy."""
    strategy = rank_job.strategy()
    if strategy.rank == 1:
        strategy.extended.guard._heartbeats.next = None
    x, y = data(24)
    for _ in range(1000):
        compiled(strategy).fit(x, y, batch_size=12, verbose=0)


def killed_before_variables() -> None:
    """Rank 1 is killed while rank 0 waits for it to make the model's variables."""
    strategy = rank_job.strategy()
    if strategy.rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    compiled(strategy)


def rank_0_unheard() -> None:
    """Rank 1 no longer hears rank 0, which hears it."""
    strategy = rank_job.strategy()
    if strategy.rank == 1:
        strategy.extended.guard._members[0].hear = lambda *_: None
        strategy.extended.guard._limit = 2.0
    x, y = data(24)
    for _ in range(1000):
        compiled(strategy).fit(x, y, batch_size=12, verbose=0)


@keras.saving.register_keras_serializable("tfdml-tests")
class Slow(layers.Layer):
    """Layer that is slow to run on one rank, and slow to trace on the other."""

    def __init__(self, seconds: float, tracing: float):
        super().__init__()
        self.seconds = seconds
        self.tracing = tracing

    def call(self, inputs):
        """Returns `inputs` after a delay."""
        time.sleep(self.tracing)

        def wait(values):
            time.sleep(self.seconds)
            return values

        result = tf.numpy_function(wait, [inputs], tf.float32)
        return tf.ensure_shape(result, inputs.shape)


def monitored(slow_rank: int) -> list:
    """Returns the report of a `StepMonitor` on two epochs in which one rank is slow."""
    strategy = rank_job.strategy()
    with strategy.scope():
        slow = Slow(0.15, 0.0) if strategy.rank == slow_rank else Slow(0.0, 2.0)
        model = keras.Sequential([layers.Input((6,)), slow, layers.Dense(3)])
        model.compile("sgd", "mse")
    x = np.ones((96, 6), "float32")
    monitor = tfdml.callbacks.StepMonitor()
    model.fit(x, x[:, :3], batch_size=12, epochs=1, verbose=0)  # Traced without the clock.
    model.fit(x, x[:, :3], batch_size=12, epochs=2, verbose=0, callbacks=[monitor])
    return monitor.epochs


def one_rank_raises_alone(rank: int) -> None:
    """A callback fails on one rank, and the program catches the error; the others wait in vain."""
    x, y = data(48)
    strategy = rank_job.strategy()
    model = compiled(strategy)

    def fail(batch, logs):
        if strategy.rank == rank:
            raise ValueError("alone")

    model.fit(
        x, y, batch_size=12, verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)],
    )  # fmt: skip


def monitored_short(steps: int) -> list:
    """Returns what a `StepMonitor` has seen of an epoch of a few steps, where rank 0 is slow."""
    strategy = rank_job.strategy()
    with strategy.scope():
        slow = Slow(0.15, 0.0) if strategy.rank == 0 else Slow(0.0, 2.0)
        model = keras.Sequential([layers.Input((6,)), slow, layers.Dense(3)])
        model.compile("sgd", "mse")
    x = np.ones((12 * steps, 6), "float32")
    monitor = tfdml.callbacks.StepMonitor()
    model.fit(x, x[:, :3], batch_size=12, epochs=2, verbose=0, callbacks=[monitor])
    return monitor.epochs
