"""Measures what checkpoints cost and survive, beside Keras's own, in one run.

    python -m tools.bench.checkpoints stall
    python -m tools.bench.checkpoints overhead
    python -m tools.bench.checkpoints kills

- `stall`: for how long training stands still for a save.
- `overhead`: how much longer training takes with a save every 100 steps.
- `kills`: a program is killed at random moments, many of them while it saves, and started again;
  counted is how often the restart fails.

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
# Steps between two saves whose stalls are timed: the write before has ended by then.
APART, SAVES = 10, 5
# Steps that are timed together: a write has ended within them.
WINDOW = 12

SYNCHRONOUS, BACKGROUND = "tfdml, synchronous", "tfdml"
ORBAX, ORBAX_SYNCHRONOUS = "Keras `OrbaxCheckpoint`", "Keras `OrbaxCheckpoint`, synchronous"
BACKUP = "Keras `BackupAndRestore`"
NAMES = (BACKGROUND, SYNCHRONOUS, ORBAX, ORBAX_SYNCHRONOUS, BACKUP)


def saver(name: str, directory: str, every: int):
    """Returns a callback that saves every so many steps."""
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
    """Trains with a save every so many steps.

    Returns:
        The moment at which each step had been trained; and the seconds for which training then
        stood still, in the callback that saves.
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
    """Does `train` in a new process, as all are."""
    return tuple(run_job(__spec__.name, "one", name, str(steps), str(every), processes=1))


def one(name: str, steps: int, every: int) -> None:
    """What a process of its own measures."""
    report(train(name, steps, every))


def stall() -> None:
    """For how long training stands still for a save."""
    print(f"Measured with {conditions()}.\n")
    print("| a save of 307 MB | training stands still, ms: median | most | step without, ms |")
    print("|---|---|---|---|")
    for name in NAMES:
        moments, stalls = in_a_process(name, SAVES * APART, APART)
        # The first save makes buffers and threads.
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
    """How much longer training takes with a save every 100 steps.

    A save is in the first of two windows of 12 steps, one after the other: what the first takes
    longer is the save's. The machine's own changes are seen in windows of its steps alone.
    """
    print(f"Measured with {conditions()}.\n")
    print(
        "| a save every 100 steps | slower by, median | quarters | without: quarters | a step, s |"
    )
    print("|---|---|---|---|---|")
    for name in names:
        moments, _ = in_a_process(name, 4 * WINDOW * (saves + 1), 4 * WINDOW)
        # The moment of a step is before its save.
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
    """A training of a network of 3.6 million parameters, to be killed."""
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
    """Kills a program again and again; returns how many restarts failed, of how many.

    A directory whose restart has failed is given up, and the next kill is of a new one.
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
    """How many restarts fail after a kill."""
    print(f"Measured with {conditions()}.\n")
    print("| killed within two seconds of a step | restarts that failed |\n|---|---|")
    for name in names:
        failed, restarts = killed(name, number)
        print(f"| {name} | {failed} of {restarts} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    start(__doc__, stall, overhead, kills, one)
