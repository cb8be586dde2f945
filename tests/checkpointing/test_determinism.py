"""Checks checkpoints under TensorFlow's determinism, where the global generator is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import keras, numpy as np, tensorflow as tf, tfdml

tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
with tfdml.MirroredStrategy(["CPU:0"]).scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.add(keras.layers.Dropout(0.5))
    model.compile("adam", "mse")

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if sys.argv[2] == "stops" and batch == 2:
            sys.exit(7)

x, y = np.ones((40, 3)), np.ones((40, 2))
saved = tfdml.callbacks.FaultTolerantCheckpoint(sys.argv[1], save_freq=1, asynchronous=False)
model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[saved, Stop()])
print(model.get_weights()[0].tobytes().hex())
"""


def _run(directory: Path, ending: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM, str(directory), ending]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.slow
def test_deterministic_program_saves_and_resumes(tmp_path):
    whole = _run(tmp_path / "whole", "ends")
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert _run(tmp_path / "resumed", "stops").returncode == 7
    resumed = _run(tmp_path / "resumed", "ends")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
