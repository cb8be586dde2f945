"""Checks that a save takes at most one more copy of the state, however long the write takes."""

import pytest

from tests.harness.command import run_python

# 160 MB of weights. Training continues during the write; prints the peak memory after step 1.
# Zeros: TensorFlow would keep an initializer's memory for random numbers, which hides a copy.
PROGRAM = """
import re, sys, time
from pathlib import Path
import keras, numpy as np, tfdml
from tfdml.checkpointing.files import Files

sync = Files.sync
Files.sync = lambda self, file: (time.sleep(0.5), sync(self, file))

class Reset(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            Path("/proc/self/clear_refs").write_text("5")

dense = keras.layers.Dense(10000, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((4000,)), dense])
model.compile(keras.optimizers.SGD(0.01), "mse")
x, y = np.ones((16, 4000), "float32"), np.ones((16, 10000), "float32")
callbacks = [Reset()]
if sys.argv[1] != "none":
    callbacks.append(tfdml.callbacks.FaultTolerantCheckpoint(sys.argv[1], save_freq=3))
model.fit(x, y, batch_size=2, verbose=0, callbacks=callbacks)
most = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print("MB", int(most) // 1024)
"""
MEGABYTES = 4 * 40_010_000 / 2**20


@pytest.mark.slow
def test_save_takes_at_most_one_copy_of_the_state(tmp_path):
    most = []
    for directory in ("none", str(tmp_path / "run")):
        done = run_python("-c", PROGRAM, directory)
        assert done.returncode == 0, done.stderr
        most.append(int(done.stdout.split("MB")[1]))
    # With less than half a copy, the test would not have seen the save.
    assert 0.5 * MEGABYTES < most[1] - most[0] < 1.2 * MEGABYTES
