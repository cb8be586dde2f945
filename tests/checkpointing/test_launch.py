"""Checks that `tfdml launch` restarts an interrupted job, which then resumes."""

import os
import sys

import pytest

from tests.harness.command import run_python
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
directory, number = pathlib.Path(sys.argv[1]), signal.Signals[sys.argv[2]]
lost = directory / "lost-127.0.0.3"
steps = []

class Ask(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        steps.append(batch)
        if strategy.rank == 1 and batch == 2 and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), number)

checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(str(directory / "run"), save_freq=1)
history = model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0, callbacks=[Ask(), checkpoint])
print("of", strategy.size, "updates", model.optimizer.iterations.numpy(),
      "epochs", len(history.history["loss"]), "here", len(steps))
"""

# Stands in for ssh: the "hosts" are addresses of this one, and a lost one does not answer.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
if [ -e "$0.d/lost-$1" ]; then echo "no route to $1" >&2; exit 255; fi
shift
exec sh -c "$*"
"""


def launched(tmp_path, *arguments: str):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    (tmp_path / "bin" / "ssh.d").symlink_to(tmp_path)
    command = [sys.executable, "-m", "tfdml.cli.main", "launch", "--max-restarts", "1"]
    path = f"{ssh.parent}{os.pathsep}{child_environment()['PATH']}"
    ended = child.run(
        [*command, *arguments[:-1], str(program), str(tmp_path), arguments[-1]],
        environment=child_environment(PATH=path),
        timeout=240,
    )
    assert ended.ok, ended.output[-4000:]
    return ended.output


@pytest.mark.slow
def test_job_that_was_asked_to_end_is_restarted(tmp_path):
    output = launched(tmp_path, "--workers", "2", "SIGTERM")
    assert "was asked to end, and has saved its state (exit code 75)" in output
    for rank in range(2):
        assert f"[{rank}] of 2 updates 10 epochs 2" in output


@pytest.mark.slow
def test_job_with_a_killed_worker_is_restarted(tmp_path):
    output = launched(tmp_path, "--workers", "2", "SIGKILL")
    assert "rank 1 failed: killed by SIGKILL" in output
    assert "restart 1 of 1, on localhost:2" in output
    for rank in range(2):
        assert f"[{rank}] of 2 updates 10 epochs 2" in output
        assert f"[{rank}] of 2 updates 10 epochs 2 here 10" not in output


@pytest.mark.slow
def test_job_continues_on_the_remaining_hosts(tmp_path):
    output = launched(
        tmp_path, "--hosts", "127.0.0.2:1,127.0.0.3:1", "--min-workers", "1", "SIGKILL"
    )
    assert "restart 1 of 1, on 127.0.0.2:1" in output
    assert "[0] of 1 updates 10 epochs 2" in output
    assert "here 10" not in output


def test_too_few_ranks_are_refused():
    for arguments in (["--workers", "2", "--min-workers", "3"], ["--min-workers", "1"]):
        done = run_python("-m", "tfdml.cli.main", "launch", *arguments, "train.py")
        assert done.returncode == 2
        assert "`--min-workers` must be at most the number of ranks" in done.stderr
