"""Trains with checkpoints of everything: kill it at any time, start it again, lose nothing.

    python recipes/resume.py run1            # kill -9 it, switch off the machine, and again
    python recipes/resume.py run1 --show     # does that by itself, and compares the bits

With several processes the same file runs as `tfdml launch --horovod --workers 2 --max-restarts 3
recipes/resume.py run1`: when one process fails, the job is restarted and resumes.
"""

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import keras
import numpy as np
import typer
from sklearn.datasets import load_digits

import tfdml


def train(strategy: tfdml.HorovodStrategy, directory: str, epochs: int) -> str:
    """Trains on scikit-learn's digits; returns a digest of the final weights."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target
    model.fit(
        x[:1500],
        y[:1500],
        batch_size=50,
        epochs=epochs,
        validation_data=(x[1500:], y[1500:]),
        verbose=2,
        # The only line needed. 10 steps is often: use 10 minutes for a long run.
        callbacks=[tfdml.callbacks.FaultTolerantCheckpoint(directory, save_freq=10)],
    )
    weights = b"".join(np.asarray(w).tobytes() for w in model.get_weights())
    return hashlib.sha256(weights).hexdigest()[:16]


def show(epochs: int) -> None:
    """Runs this file undisturbed, and killed several times; prints both results."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--epochs", str(epochs)]
        undisturbed = _digest(subprocess.check_output([*command, f"{scratch}/a"], text=True))
        for _ in range(3):
            process = subprocess.Popen([*command, f"{scratch}/b"], stdout=subprocess.DEVNULL)
            before = _newest(scratch)
            while process.poll() is None and _newest(scratch) == before:
                time.sleep(0.01)
            process.kill()
            process.wait()
        killed = _digest(subprocess.check_output([*command, f"{scratch}/b"], text=True))
    print(f"undisturbed: weights {undisturbed}\nkilled 3 times: weights {killed}")
    if undisturbed != killed:
        sys.exit("They differ.")


def _newest(scratch: str) -> list[str]:
    return sorted(path.name for path in Path(scratch).glob("b/fit-*"))[-1:]


def _digest(output: str) -> str:
    return output.strip().splitlines()[-1].split()[-1]


def main(
    directory: Annotated[str, typer.Argument(help="Where the checkpoints are.")] = "run1",
    epochs: int = 5,
    kill_and_compare: Annotated[bool, typer.Option("--show")] = False,
) -> None:
    """Trains, or shows what a kill does."""
    if kill_and_compare:
        show(epochs)
    else:
        strategy = tfdml.HorovodStrategy()
        digest = train(strategy, directory, epochs)
        if strategy.is_chief:
            print("weights", digest)


if __name__ == "__main__":
    typer.run(main)
