"""Measures what checkpoints cost and survive, beside Keras's own, in one run.

    .venv/bin/python tools/bench_checkpoints.py            # all
    .venv/bin/python tools/bench_checkpoints.py --part stall

- `stall`: for how long training stands still for a save, and how long until it is on the disk.
- `overhead`: how much slower training is with a save every 100 steps.
- `kills`: a program is killed at random moments, many of them while it saves, and started again;
  counted is how often the restart fails.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_strategies import conditions

ROOT = Path(__file__).resolve().parents[1]
SAVES = 8


def network(width: int = 2450):
    """Returns a compiled CNN with 25 million parameters, most of them in its dense layers."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(128, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(4 * width, activation="relu"),
            keras.layers.Dense(width // 2, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def batches(count: int, size: int):
    """Returns arguments of `fit` for so many steps."""
    import numpy as np

    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(count * size, 32, 32, 3)).astype("float32")
    return {"x": x, "y": numbers.integers(0, 10, count * size), "batch_size": size, "verbose": 0}


def saver(name: str, directory: str, every: int):
    """Returns a callback that saves every so many steps."""
    import keras

    import tfdml

    make = tfdml.callbacks.FaultTolerantCheckpoint
    if name == "tfdml":
        return make(directory, save_freq=every)
    if name == "tfdml, synchronous":
        return make(directory, save_freq=every, asynchronous=False)
    if name == "Keras `BackupAndRestore`":
        return keras.callbacks.BackupAndRestore(directory, save_freq=every)
    return keras.callbacks.OrbaxCheckpoint(
        directory, save_freq=every, save_on_background="background" in name, max_to_keep=3
    )


NAMES = (
    "tfdml",
    "tfdml, synchronous",
    "Orbax, in the background",
    "Orbax, synchronous",
    "Keras `BackupAndRestore`",
)


def stalls(name: str) -> dict[str, list[float]]:
    """Returns the seconds of each save: how long training stood still, and the time on the disk.

    The second is known of synchronous saves only: for those it is the first.
    """
    model, every, seconds = network(), 4, []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        callback = saver(name, directory, every)
        plain = callback.on_train_batch_end

        def timed(batch, logs=None):
            begin = time.perf_counter()
            plain(batch, logs)
            if (batch + 1) % every == 0:
                seconds.append(time.perf_counter() - begin)

        callback.on_train_batch_end = timed
        model.fit(**batches(SAVES * every, 8), epochs=1, callbacks=[callback])
    return {name: seconds[2:]}


def overhead(rounds: int = 3, steps: int = 400) -> list[str]:
    """Returns lines on training with a save every 100 steps and without, in turn."""
    model, given = network(), batches(steps, 8)
    times: dict[str, list[float]] = {"without": [], "with": []}
    model.fit(**{**given, "epochs": 1}, steps_per_epoch=5)
    for _ in range(rounds):
        for kind, seconds in times.items():
            with tempfile.TemporaryDirectory() as directory:
                callbacks = [saver("tfdml", directory, 100)] if kind == "with" else []
                begin = time.perf_counter()
                model.fit(**given, epochs=1, callbacks=callbacks)
                seconds.append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
    step = min(times["without"]) / steps
    return [
        f"{steps} steps of {1000 * step:.0f} ms, {rounds} rounds in turn: with a save every 100 "
        f"steps (and at the end) {statistics.median(ratios):.3f} times the time without "
        f"({', '.join(f'{r:.3f}' for r in ratios)})."
    ]


PROGRAM = """
import sys, time
sys.path.insert(0, {tools!r})
import keras
import bench_checkpoints as bench
keras.utils.set_random_seed(1)
model = bench.network(400)
callback = bench.saver({name!r}, {directory!r}, 5)
print("ready", flush=True)
model.fit(**bench.batches(40, 8), epochs={epochs}, shuffle=False, callbacks=[callback])
print("done", int(model.optimizer.iterations), flush=True)
"""


def killed(name: str, kills: int, seed: int = 0) -> tuple[int, int]:
    """Kills a program again and again; returns how many restarts failed, of how many.

    A directory whose restart has failed is given up, and the next kill is of a new one.
    """
    numbers, failed = random.Random(seed), 0
    directory = tempfile.mkdtemp()
    for _ in range(kills):
        text = PROGRAM.format(
            tools=str(ROOT / "tools"), name=name, directory=f"{directory}/run", epochs=1000
        )
        if not _kill_one(text, numbers.uniform(1.0, 5.0)):
            failed += 1
            shutil.rmtree(directory)
            directory = tempfile.mkdtemp()
    shutil.rmtree(directory)
    return failed, kills


def _kill_one(text: str, seconds: float) -> bool:
    """Starts the program, kills it; returns whether it was training by then."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    process.stdout.readline()
    time.sleep(seconds)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def main(part: str = "all", one: str = "", kills: int = 40) -> None:
    """Prints the results as Markdown."""
    if one:
        print(json.dumps(stalls(one)))
        return
    print(f"Measured with {conditions()}.\n")
    if part in ("all", "stall"):
        print("| save of 75 million numbers (300 MB) | training stands still, ms (median; max) |")
        print("|---|---|")
        for name in NAMES:
            command = [sys.executable, __file__, "--one", name]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
            if ended.returncode:
                print(f"| {name} | failed: {ended.stderr.strip().splitlines()[-1]} |")
                continue
            times = json.loads(ended.stdout.strip().splitlines()[-1])[name]
            print(f"| {name} | {1000 * statistics.median(times):.0f}; {1000 * max(times):.0f} |")
    if part in ("all", "overhead"):
        print("\n".join(["", *overhead()]))
    if part in ("all", "kills"):
        print("\n| killed at random moments | restarts that failed |\n|---|---|")
        for name in ("tfdml", "Keras `BackupAndRestore`"):
            failed, of = killed(name, kills)
            print(f"| {name} | {failed} of {of} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
