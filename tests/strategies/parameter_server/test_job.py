"""Checks `tfdml serve` and `tfdml launch --ps`: roles, exit codes, and malformed clusters."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.harness.command import run_python
from tests.runtime.faults.jobs import left_of
from tfdml.runtime.launch.supervisor import free_ports
from tfdml.runtime.servers.server_task import checked_task, task_from_environment

TFDML = [sys.executable, "-m", "tfdml.cli.main"]
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}

TRAIN = """
import sys
import keras, numpy as np, tensorflow as tf, tfdml

strategy = tfdml.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((16, 4), "float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(8)
model.fit(data, steps_per_epoch=10, verbose=2)
print("iterations", int(model.optimizer.iterations.numpy()), flush=True)
"""

BOTH_MODES = """
import sys
import keras, numpy as np, tensorflow as tf, tfdml

# Before the strategy: connecting to the cluster gives this process's devices other names.
x = np.ones((16, 4), "float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(8)
few = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
for synchronous in (False, True):
    strategy = tfdml.ParameterServerStrategy(synchronous=synchronous)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data, steps_per_epoch=10, verbose=2, validation_data=few)
    print("iterations", int(model.optimizer.iterations.numpy()), flush=True)
    print("predicted", len(model.predict(few, verbose=0)), model.evaluate(few, verbose=0) >= 0)
"""


def run(*arguments: str, timeout: float = 150, **environment: str):
    """Runs `tfdml`; returns the finished process."""
    return subprocess.run(
        [*TFDML, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )


def script(tmp_path, text: str) -> str:
    """Writes a script; returns its path."""
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def test_launch_runs_a_whole_job(tmp_path):
    # Exit handlers registered first run last: the chief outlives its workers.
    text = "import atexit, time\natexit.register(time.sleep, 2)\n" + BOTH_MODES
    done = run("launch", "--workers", "1", "--ps", "1", script(tmp_path, text))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("iterations 10") == 2
    assert done.stdout.count("predicted 16 True") == 2
    for name in ("[worker 0] ", "[ps 0] "):
        assert f"{name}tfdml serve" in done.stderr
    assert done.stderr.count("ends, because the chief is done.") == 2
    assert "is lost" not in done.stderr
    assert not left_of(tmp_path)


@pytest.mark.slow
def test_a_chief_that_fails_ends_the_job(tmp_path):
    # Exit handlers registered first run last, and this would block the chief forever.
    waits = "import atexit, time\natexit.register(time.sleep, 3600)\n"
    text = waits + TRAIN.replace("model.fit(", "raise RuntimeError('a mistake')\nmodel.fit(")
    done = run("launch", "--workers", "1", "--ps", "1", script(tmp_path, text))
    assert done.returncode == 1
    assert "tfdml launch: the chief failed: exit code 1. Its last lines:" in done.stderr
    assert done.stderr.count("has failed: RuntimeError: a mistake") == 2
    assert not left_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_script_started_in_another_role_is_reported(role, tmp_path):
    config = json.dumps({"cluster": CLUSTER, "task": {"type": role, "index": 0}})
    done = subprocess.run(
        [sys.executable, script(tmp_path, TRAIN)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 1
    assert "The training script must run only on the chief" in done.stderr
    assert "Run `tfdml serve` here instead" in done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "`TF_CONFIG` must describe the cluster"),
        ("{", "`TF_CONFIG` must be JSON"),
        ("[]", "`TF_CONFIG` must be a JSON object"),
        (json.dumps({"cluster": CLUSTER}), "must have a task with a type and an index"),
    ],
)
def test_a_malformed_tf_config(monkeypatch, config, words):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=words):
        task_from_environment()


@pytest.mark.parametrize(
    ("changes", "task", "words"),
    [
        ({"ps": []}, ("chief", 0), "no ps in"),
        ({"ps": [], "chief": []}, ("worker", 0), "use `tfdml.MultiWorkerMirroredStrategy`"),
        ({"worker": [], "ps": []}, ("chief", 0), "no worker and no ps in"),
        ({"chief": []}, ("worker", 0), "no chief in"),
        ({"chief": ["a:1", "e:1"]}, ("chief", 0), "must have one chief"),
        ({"evaluator": ["e:1"]}, ("chief", 0), "roles must be among chief, worker and ps"),
        ({"ps": ["b:1"]}, ("chief", 0), "b:1 for worker 0 and for parameter server 0"),
        ({"ps": ["d"]}, ("chief", 0), "An address must be host:port. Received: 'd'"),
        ({"ps": ["d:99999"]}, ("chief", 0), "An address must be host:port"),
        ({}, ("master", 0), "The task's type must be chief, worker or ps"),
        ({}, ("worker", 2), "The task's index must be from 0 to 1 for a worker"),
        ({}, ("worker", -1), "The task's index must be from 0 to 1"),
        ({"ps": "d:1"}, ("chief", 0), "must name lists of addresses by role"),
    ],
)
def test_impossible_cluster_is_refused(changes, task, words):
    with pytest.raises(ValueError, match=words):
        checked_task({**CLUSTER, **changes}, *task)


def test_a_task():
    task = checked_task(CLUSTER, "worker", "1")
    assert (task.address, task.name, len(task.others)) == ("c:1", "worker 1", 3)


def served(cluster: dict, role: str, *options: str) -> subprocess.Popen:
    """Starts `tfdml serve`."""
    config = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
    return subprocess.Popen(
        [*TFDML, "serve", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


@pytest.mark.slow
def test_another_strategy_on_the_chief_is_warned_of():
    config = json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})
    code = "import tfdml; tfdml.HorovodStrategy()"
    done = run_python("-c", code, TF_CONFIG=config)
    assert done.returncode == 0, done.stderr
    assert "`HorovodStrategy` trains in this process alone" in done.stderr
    assert "Use `tfdml.ParameterServerStrategy` here." in done.stderr
    meant = "import tfdml\nwith tfdml.alone(): tfdml.HorovodStrategy()"
    done = run_python("-c", meant, TF_CONFIG=config)
    assert "trains in this process alone" not in done.stderr


@pytest.mark.slow
def test_workers_alone_are_refused_on_the_chief():
    config = json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})
    done = run_python("-c", "import tfdml; tfdml.MultiWorkerMirroredStrategy()", TF_CONFIG=config)
    assert done.returncode == 1
    assert "Use `tfdml.ParameterServerStrategy` on the chief" in done.stderr


@pytest.mark.slow
def test_a_chief_that_never_comes():
    chief, worker, ps = (f"127.0.0.1:{p}" for p in free_ports(3))
    server = served({"chief": [chief], "worker": [worker], "ps": [ps]}, "ps", "--start-limit", "1")
    _, stderr = server.communicate(timeout=90)
    assert server.returncode == 70
    assert f"the chief at {chief} did not answer within 1 s" in stderr


def test_serve_rejects_the_chief():
    config = json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})
    done = run("serve", TF_CONFIG=config)
    assert done.returncode == 2
    assert "Run the training script there" in done.stderr


def test_launch_explains_incompatible_options_of_ps(tmp_path):
    done = run("launch", "--ps", "1", "--hosts", "a:1", "x.py")
    assert done.returncode == 2
    assert "`--ps` must be used without `--hosts`" in done.stderr


def test_an_sbatch_script_makes_the_same_cluster(tmp_path):
    done = run("launch", "--workers", "2", "--ps", "1", "--print-slurm", "train.py")
    directory = tmp_path / "bin"
    directory.mkdir()
    programs = {
        "srun": 'while [ "${1:0:2}" = -- ]; do shift; done\n'
        'for i in 0 1 2 3; do SLURM_PROCID=$i "$@"; done',
        "hostname": "echo node$((SLURM_PROCID / 2))",
        "python": 'echo "$TF_CONFIG $@"',
        "tfdml": 'echo "$TF_CONFIG $@"',
    }
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    lines = subprocess.run(
        [shutil.which("bash"), "-c", done.stdout],
        env={"PATH": f"{directory}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    commands = [line[line.rindex("}") + 2 :] for line in lines]
    assert commands == ["train.py", "serve", "serve", "serve"]
    configs = [json.loads(line[: line.rindex("}") + 1]) for line in lines]
    tasks = [checked_task(c["cluster"], c["task"]["type"], c["task"]["index"]) for c in configs]
    assert [t.name for t in tasks] == ["the chief", "parameter server 0", "worker 0", "worker 1"]
    assert [t.address.split(":")[0] for t in tasks] == ["node0", "node0", "node1", "node1"]


def kill(job: subprocess.Popen, role: str, index: int) -> None:
    """Kills the process that runs a task of a launched job, not its supervisor."""
    for process in psutil.Process(job.pid).children(recursive=True):
        variables = process.environ().get("TF_CONFIG", "")
        watches = "tfdml.runtime.launch.supervisor" in process.cmdline()
        if f'"type": "{role}", "index": {index}' in variables and not watches:
            process.send_signal(signal.SIGKILL)


# Trains until a worker that was lost takes steps again.
UNTIL_BACK = """
import time
import keras

class UntilBack(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("begun", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if not strategy.connection.link.returned:
            self.model.train_function.workers_seen.clear()
        elif 1 in self.model.train_function.workers_seen:
            print("worker 1 takes steps again", flush=True)
            self.model.stop_training = True
"""


@pytest.mark.slow  # `test_faults` kills a worker without the launcher.
def test_launch_restarts_a_worker(tmp_path):
    text = UNTIL_BACK + TRAIN.replace(
        "steps_per_epoch=10, verbose=2",
        "steps_per_epoch=10**6, verbose=0, callbacks=[UntilBack()]",
    )
    job = subprocess.Popen(
        [*TFDML, "launch", "--workers", "2", "--ps", "1", script(tmp_path, text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert any("begun" in line for line in job.stdout)
    kill(job, "worker", 1)
    stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr[-3000:]
    assert "worker 1 failed: killed by SIGKILL (exit code 137). It is started again." in stderr
    assert "worker 1 takes steps again" in stdout
    # The cause comes before what TensorFlow reports of the connection.
    assert stderr.index("worker 1 is lost") < stderr.index("failed with UnavailableError")


SLOWLY = "keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.02))"


def killed_in_a_job(tmp_path, role: str, text: str, *options: str) -> tuple[str, str]:
    """Runs a job that saves checkpoints, and kills a task; returns its output and its messages."""
    checkpoints = tmp_path / "checkpoints"
    saves = f"tfdml.callbacks.FaultTolerantCheckpoint({str(checkpoints)!r}, save_freq=10)"
    text = "import time\n" + text.replace(
        "steps_per_epoch=10, verbose=2", f"steps_per_epoch=500, callbacks=[{saves}, {SLOWLY}]"
    )
    job = subprocess.Popen(
        [*TFDML, "launch", "--workers", "1", "--ps", "1", *options, script(tmp_path, text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("*/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    kill(job, role, 0)
    stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr[-3000:]
    assert "continues at step" in stdout + stderr
    assert "iterations 500" in stdout
    return stdout, stderr


@pytest.mark.slow  # `test_restart` does it without the launcher.
@pytest.mark.parametrize("role", ["ps", "chief"])
def test_launch_restarts_a_job_that_resumes(tmp_path, role):
    _, stderr = killed_in_a_job(tmp_path, role, TRAIN, "--max-restarts", "1")
    assert "restart 1 of 1" in stderr


@pytest.mark.slow  # `test_restart` does it without the launcher.
def test_launch_restarts_a_server_for_which_the_chief_waits(tmp_path):
    text = TRAIN.replace("ParameterServerStrategy()", "ParameterServerStrategy(restart_limit=60)")
    _, stderr = killed_in_a_job(tmp_path, "ps", text)
    assert "parameter server 0 failed: killed by SIGKILL (exit code 137). It is started" in stderr
    assert "parameter server 0 is back." in stderr
