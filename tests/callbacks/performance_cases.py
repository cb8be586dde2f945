"""Cases run by ranks: trainings with `PerformanceMetrics`, and what their loggers have seen."""

import contextlib
import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.local_updates import cases as local_cases
from tests.strategies.sharded import table_cases
from tfdml.callbacks import PerformanceMetrics
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.replicas.rank_state import RankState

FEATURES, BATCH = 40, 12


def problem(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of a linear problem, the same on all ranks."""
    x = np.random.default_rng(0).normal(size=(steps * BATCH, FEATURES)).astype("float32")
    return x, x @ np.ones((FEATURES, 30), "float32")


def linear(optimizer: Any = "sgd", before: Any = None, **options: Any) -> keras.Model:
    """Returns a linear model from zeros, which NumPy can follow; 1,200 weights."""
    given = [before] if before is not None else []
    kernel = layers.Dense(30, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([layers.Input((FEATURES,)), *given, kernel])
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
    return model


def norms(steps: int, learning_rate: float = 0.01) -> list[float]:
    """Returns the norm of each step's gradient of the linear problem, by NumPy in float64."""
    x, y = (a.astype("float64") for a in problem(steps))
    weights, found = np.zeros((FEATURES, 30)), []
    for start in range(0, len(x), BATCH):
        rows = slice(start, start + BATCH)
        gradient = 2 * x[rows].T @ (x[rows] @ weights - y[rows]) / y[rows].size
        found.append(float(np.linalg.norm(gradient)))
        weights -= learning_rate * gradient
    return found


def perf(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `PerformanceMetrics`, by the name without its prefix."""
    return {k.removeprefix("perf/"): v for k, v in logs.items() if k.startswith("perf/")}


def logged(folder: str, options: dict, steps: int = 4, epochs: int = 3) -> dict[str, Any]:
    """Trains with loggers that come before `PerformanceMetrics`; returns what they have.

    Args:
        folder: Directory for files.
        options: Arguments of the strategy.
        steps: Steps of an epoch.
        epochs: Number of epochs; the second one validates.
    """
    strategy = rank_job.strategy(**options)
    with strategy.scope():
        model = linear()
    x, y = problem(steps)
    table = Path(folder) / "log.csv"
    callbacks = [
        keras.callbacks.CSVLogger(str(table)),
        tfdml.callbacks.GradientNoiseScale(),
        PerformanceMetrics(window=1, directory=Path(folder) / "ranks"),
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = model.fit(
            x, y, batch_size=BATCH, epochs=epochs, shuffle=False, callbacks=callbacks,
            validation_data=(x, y), validation_freq=2,
        ).history  # fmt: skip
    return {
        "history": perf(history),
        "table": table.read_text() if strategy.rank == 0 else None,
        "printed": printed.getvalue(),
        "lines": (Path(folder) / "ranks" / f"rank_{strategy.rank}.jsonl").read_text().splitlines(),
    }


def compressed(codec: dict[str, Any], window: int, steps: int) -> dict[str, Any]:
    """Returns the logs of an epoch with a codec, and the norm of all that this rank has left.

    Args:
        codec: Arguments of the codec, and its class.
        window: Argument of `PerformanceMetrics`.
        steps: The number of steps.
    """
    codec = dict(codec)
    compression = getattr(tfdml.compression, codec.pop("class"))(**codec)
    strategy = rank_job.strategy(compression=compression)
    with strategy.scope():
        model = linear()
    x, y = problem(steps)
    metrics = PerformanceMetrics(window=window)
    logs = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[metrics]).history
    own = RankState(model).local_state()
    left = sum(
        float(np.square(v.astype("float64")).sum()) for n, v in own.items() if "residual" in n
    )
    return {"logs": perf(logs), "squared_residual": left}


class Slow(layers.Layer):
    """Layer that takes some time."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def call(self, inputs):
        """Returns `inputs` after a delay."""

        def wait(values):
            time.sleep(self.seconds)
            return values

        return tf.ensure_shape(tf.numpy_function(wait, [inputs], tf.float32), inputs.shape)


def of_slow_rank(compute: float, reading: float) -> dict[str, Any]:
    """Returns the logs of a training whose rank 1 computes, or reads, slowly; and the monitor's.

    Args:
        compute: Seconds by which a step of rank 1 takes longer.
        reading: Seconds by which rank 1 waits longer for a batch.
    """
    strategy = rank_job.strategy()
    is_slow = strategy.rank == 1
    with strategy.scope():
        model = linear(before=Slow(compute if is_slow else 0.0))
    x, y = problem(8)
    read = Slow(reading if is_slow else 0.0)
    # Each rank has a pipeline of its own, which reads all rows.
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    data = data.map(lambda a, b: (read.call(a), b))
    monitor = tfdml.callbacks.StepMonitor()
    callbacks = [monitor, PerformanceMetrics()]
    logs = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
    clocks = len(get_session(model).observers)
    shown = [[(1000 * t.compute, 1000 * t.wait) for t in epoch] for epoch in monitor.epochs]
    return {"logs": perf(logs), "shown": shown, "observers": clocks}


def of_overflows() -> dict[str, Any]:
    """Returns the logs of three epochs; in the second one two of four batches overflow."""
    strategy = rank_job.strategy()
    with strategy.scope():
        sgd = keras.optimizers.SGD(0.01)
        model = linear(tfdml.mixed_precision.LossScaleOptimizer(sgd, initial_scale=64.0))
    x, y = problem(12)
    for batch in (4, 6):
        x[(batch + 1) * BATCH - 1] = np.inf  # The last row is the last rank's.
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    callbacks = [PerformanceMetrics(window=1)]
    # An epoch is 4 of the 12 batches.
    return perf(
        model.fit(data, epochs=3, steps_per_epoch=4, verbose=0, callbacks=callbacks).history
    )


def with_checkpoints(folder: str, saves: bool) -> dict[str, Any]:
    """Returns the logs of a training that saves during its epochs, or not."""
    strategy = rank_job.strategy()
    with strategy.scope():
        model = linear()
    callbacks: list = [PerformanceMetrics()]
    if saves:
        checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(folder, 2, asynchronous=False)
        callbacks.insert(0, checkpoint)
    x, y = problem(6)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks).history
    return perf(history)


def of_options(kind: str) -> dict[str, Any]:
    """Returns the logs of trainings whose steps differ from a plain one.

    Args:
        kind: "accumulation", "local updates", "sharding", "several steps" or "eager".
    """
    options: dict[str, Any] = {}
    compile_options: dict[str, Any] = {}
    optimizer: Any = keras.optimizers.SGD(0.01)
    if kind == "local updates":
        options["local_updates"] = local_cases.method_of(("LocalSGD", {"sync_every": 3}))
    elif kind == "sharding":
        options["sharding"] = tfdml.Sharding()
    elif kind == "several steps":
        compile_options["steps_per_execution"] = 3
    elif kind == "eager":
        compile_options["run_eagerly"] = True
    strategy = rank_job.strategy(**options)
    with strategy.scope():
        if kind == "accumulation":
            optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
        model = linear(optimizer, before=Slow(0.02), **compile_options)
    x, y = problem(6)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
        callbacks=[PerformanceMetrics(window=1)],
    ).history  # fmt: skip
    return perf(history)


def of_one_process(jit_compile: bool, ours: bool) -> dict[str, Any]:
    """Returns the logs of a process that trains alone, and its losses with and without them.

    Args:
        jit_compile: Argument of `compile`.
        ours: Whether the model is in the scope of a strategy of tfdml.
    """
    x, y = problem(6)
    metrics = PerformanceMetrics(window=1)
    with rank_job.strategy().scope() if ours else contextlib.nullcontext():
        model = linear(jit_compile=jit_compile)
    logs = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[metrics]
    ).history
    plain = linear(jit_compile=jit_compile)
    expected = plain.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"logs": perf(logs), "losses": logs["loss"], "expected": expected["loss"]}


def utilizations(peaks: list[float | None]) -> list[dict[str, Any]]:
    """Returns the logs of a `fit` for each given peak of rank 1; that of rank 0 is 1e9."""
    strategy = rank_job.strategy()
    with strategy.scope():
        model = linear()
    found = []
    for peak in peaks:
        metrics = PerformanceMetrics(peak_flops=1e9 if strategy.rank == 0 else peak)
        logs = model.fit(*problem(4), batch_size=BATCH, verbose=0, callbacks=[metrics]).history
        found.append(perf(logs))
    return found


def counted_operations(kind: str) -> float:
    """Returns the operations by row that are counted for a model, while it trains.

    Args:
        kind: "tables" for tables that are dealt to the ranks; "normalized" for synchronized batch
            normalization and a layer that is computed again.
    """
    strategy = rank_job.strategy(sharding=table_cases.BOTH if kind == "tables" else None)
    x, y = problem(2)
    with strategy.scope():
        if kind == "tables":
            model = table_cases.make_model()
            x, y = table_cases.data(2 * BATCH)
        else:
            rows = layers.Input((FEATURES,))
            hidden = tfdml.remat(layers.Dense(20, activation="tanh"))(rows)
            normalized = layers.BatchNormalization(synchronized=True)(hidden)
            model = keras.Model(rows, layers.Dense(30)(normalized))
        model.compile("adam", "mse")
    metrics = PerformanceMetrics(peak_flops=1e9)
    logs = perf(model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[metrics]).history)
    return logs["flops_utilization"][0] * 1e9 * 2 / logs["samples_per_sec"][0]


def of_servers(synchronous: bool, folder: str) -> dict[str, Any]:
    """Returns the logs of workers of parameter servers.

    Args:
        synchronous: Argument of the strategy.
        folder: Directory for each worker's own numbers.
    """
    strategy = tfdml.ParameterServerStrategy(synchronous=synchronous)
    with strategy.scope():
        model = linear()
    x, y = problem(12)
    metrics = PerformanceMetrics(peak_flops=1e6, directory=folder)
    monitor = tfdml.callbacks.StepMonitor()
    callbacks = [monitor, metrics]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        logs = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks).history
    shown = [dataclasses.asdict(times) for times in monitor.epochs[1]]
    return {"logs": perf(logs), "shown": shown, "printed": printed.getvalue()}


def lines_of(folder: str) -> list[dict[str, Any]]:
    """Returns the lines of JSON of all files of a directory, each with its file's name."""
    return [
        {"file": path.stem, **json.loads(line)}
        for path in sorted(Path(folder).glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
