"""A job that is asked to end, under `tfdml launch`: it is started again, and goes on."""

import sys

import pytest

from tfdml.horovod_build import child
from tfdml.topology import child_environment

PROGRAM = """
import os, signal, sys, pathlib
import keras, numpy as np, tfdml
strategy = tfdml.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
x = np.arange(80, dtype="float32").reshape(20, 4) / 80
done = pathlib.Path(sys.argv[1], f"asked{strategy.rank}")

class Ask(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.rank == 1 and batch == 2 and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGTERM)

checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(sys.argv[1] + "/run")
history = model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0, callbacks=[Ask(), checkpoint])
print("steps", model.optimizer.iterations.numpy(), len(history.history["loss"]))
"""


@pytest.mark.slow
def test_a_job_that_was_asked_to_end_is_started_again(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "tfdml.cli.main", "launch", "--workers", "2"]
    command += ["--max-restarts", "1", str(program), str(tmp_path)]
    ended = child.run(command, environment=child_environment(), timeout=240)
    assert ended.ok, ended.output[-4000:]
    assert "was asked to end, and has saved its state (exit code 75)" in ended.output
    assert "[0] steps 10 2" in ended.output
    assert "[1] steps 10 2" in ended.output
