"""Measures the cost and reliability of checkpoints against Keras's own, in one run.

    python -m tools.bench.checkpoints stall
    python -m tools.bench.checkpoints overhead
    python -m tools.bench.checkpoints kills

- `stall`: how long a save blocks training.
- `overhead`: how much longer training takes with a save every 100 steps.
- `kills`: how often a restart fails after the program was killed at a random moment, often while
  it was saving.

The network of the first two is ResNet-50: 25.6 million parameters, 307 MB with Adam's slots.
"""

import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.harness import conditions, report, run_job, start

BATCH, PIXELS = 4, 32
# Steps between two timed saves: enough for the previous write to end.
APART, SAVES = 10, 5
# Steps of a timed window: enough for a write to end.
WINDOW = 12

SYNCHRONOUS, BACKGROUND = "tfdml, synchronous", "tfdml"
ORBAX, ORBAX_SYNCHRONOUS = "Keras `OrbaxCheckpoint`", "Keras `OrbaxCheckpoint`, synchronous"
BACKUP = "Keras `BackupAndRestore`"
NAMES = (BACKGROUND, SYNCHRONOUS, ORBAX, ORBAX_SYNCHRONOUS, BACKUP)


def saver(name: str, directory: str, every: int):
    """Returns a callback that saves every `every` steps."""
    import keras

    import tfdml

    if name in (BACKGROUND, SYNCHRONOUS):
        return tfdml.callbacks.FaultTolerantCheckpoint(
            directory, save_freq=every, asynchronous=name == BACKGROUND
        )
    if name == BACKUP:
        return keras.callbacks.BackupAndRestore(directory, save_freq=every)
    return keras.callbacks.OrbaxCheckpoint(
        directory, save_freq=every, save_on_background=name == ORBAX, max_to_keep=3
    )


def resnet():
    """Returns a compiled ResNet-50."""
    import keras

    model = keras.applications.ResNet50(weights=None, input_shape=(PIXELS, PIXELS, 3))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def train(name: str, steps: int, every: int) -> tuple[list[float], list[float]]:
    """Trains with a save every `every` steps.

    Returns:
        Time at the end of each step, and the seconds that the saving callback then took.
    """
    import keras
    import numpy as np

    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(BATCH, PIXELS, PIXELS, 3)).astype("float32")
    y = numbers.integers(0, 1000, BATCH)
    moments, stalls = [], []

    def moment(batch, logs=None):
        moments.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        callback = saver(name, directory, every)
        save = callback.on_train_batch_end

        def timed(batch, logs=None):
            begin = time.perf_counter()
            save(batch, logs)
            stalls.append(time.perf_counter() - begin)

        callback.on_train_batch_end = timed
        first = keras.callbacks.LambdaCallback(on_train_batch_end=moment)
        resnet().fit(
            np.tile(x, (steps, 1, 1, 1)),
            np.tile(y, steps),
            batch_size=BATCH,
            verbose=0,
            callbacks=[first, callback],
        )
    return moments, stalls


def in_a_process(name: str, steps: int, every: int) -> tuple[list[float], list[float]]:
    """Runs `train` in a new process, so that all measurements start equally."""
    return tuple(run_job(__spec__.name, "one", name, str(steps), str(every), processes=1))


def one(name: str, steps: int, every: int) -> None:
    """Measures one training in this process and reports it."""
    report(train(name, steps, every))


def stall() -> None:
    """Measure how long a save blocks training."""
    print(f"Measured with {conditions()}.\n")
    print("| a save of 307 MB | training stands still, ms: median | most | step without, ms |")
    print("|---|---|---|---|")
    for name in NAMES:
        moments, stalls = in_a_process(name, SAVES * APART, APART)
        # The first save creates buffers and threads.
        saves = [1000 * s for s in stalls[APART - 1 :: APART]][1:]
        steps = [1000 * (b - a) for a, b in zip(moments, moments[1:], strict=False)]
        print(
            f"| {name} | {statistics.median(saves):.0f} | {max(saves):.0f} "
            f"| {statistics.median(steps):.0f} |",
            flush=True,
        )


def overhead(
    saves: Annotated[int, typer.Option(help="How many, after one that is not counted.")] = 20,
    names: Annotated[list[str], typer.Option("--name")] = (BACKGROUND, ORBAX, BACKUP),
) -> None:
    """Measure how much longer training takes with a save every 100 steps.

    A save falls into the first of two consecutive windows of 12 steps: the difference of their
    times is the cost of the save. Windows without a save show the machine's own variation.
    """
    print(f"Measured with {conditions()}.\n")
    print(
        "| a save every 100 steps | slower by, median | quarters | without: quarters | a step, s |"
    )
    print("|---|---|---|---|---|")
    for name in names:
        moments, _ = in_a_process(name, 4 * WINDOW * (saves + 1), 4 * WINDOW)
        # The time of a step is taken before its save.
        marks = moments[4 * WINDOW - 1 :: WINDOW]
        windows = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        step = statistics.median(windows) / WINDOW

        def slower(first: int, step=step, windows=windows) -> list[float]:
            pairs = zip(windows[first::4], windows[first + 1 :: 4], strict=False)
            return statistics.quantiles([(a - b) / step for a, b in pairs])

        (low, median, high), (least, _, most) = slower(0), slower(2)
        print(
            f"| {name} | {median:.1f} % | {low:.1f} to {high:.1f} | {least:.1f} to {most:.1f} "
            f"| {step:.2f} |",
            flush=True,
        )


def victim(name: str, directory: str, ready) -> None:
    """Trains a network of 3.6 million parameters until it is killed."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="relu") for width in (1600, 200)]
    model = keras.Sequential([keras.Input((2048,)), *layers, keras.layers.Dense(10)])
    model.compile("adam", "mse")
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(320, 2048)), numbers.normal(size=(320, 10))
    started = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ready.set())
    callbacks = [started, saver(name, directory, 5)]
    model.fit(x, y, batch_size=8, epochs=10**6, verbose=0, shuffle=False, callbacks=callbacks)


def killed(name: str, kills: int, seed: int = 0) -> tuple[int, int]:
    """Kills a program repeatedly; returns the number of failed restarts and of all restarts.

    After a failed restart the next program gets a new directory.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras"])
    numbers = random.Random(seed)
    scratch = Path(tempfile.mkdtemp())
    directory, restarts, failed = scratch / "0", 0, 0
    for number in range(kills):
        ready = context.Event()
        process = context.Process(target=victim, args=(name, str(directory), ready))
        restarting = directory.exists()
        restarts += restarting
        process.start()
        began = time.monotonic()
        while not ready.wait(0.1) and process.is_alive() and time.monotonic() - began < 120:
            pass
        if not ready.is_set():
            if not restarting:
                raise RuntimeError(f"{name} did not train at all.")
            failed += 1
            shutil.rmtree(directory)
            directory = scratch / str(number + 1)
        else:
            time.sleep(numbers.uniform(0.0, 2.0))
        process.kill()
        process.join()
    shutil.rmtree(scratch)
    return failed, restarts


def kills(
    number: Annotated[int, typer.Option("--number")] = 40,
    names: Annotated[list[str], typer.Option("--name")] = (BACKGROUND, BACKUP),
) -> None:
    """Count the restarts that fail after a kill."""
    print(f"Measured with {conditions()}.\n")
    print("| killed within two seconds of a step | restarts that failed |\n|---|---|")
    for name in names:
        failed, restarts = killed(name, number)
        print(f"| {name} | {failed} of {restarts} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    start(__doc__, stall, overhead, kills, one)
