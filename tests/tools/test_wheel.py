"""Checks a fresh clone up to training from the wheel: an empty environment, no compiler on PATH."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tools.checkouts import copy_of_the_checkout

pytestmark = pytest.mark.slow

# All commands that tools/wheel runs, apart from Python.
COMMANDS = (
    *("bash", "cat", "date", "dirname", "env", "flock", "id", "ls", "mkdir", "rm", "sed", "tail"),
)
TRAIN = """
import hashlib, json, sys
import keras, numpy as np, tfdml
from tfdml.native import library

codec, directory, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
compression = None if codec == "none" else getattr(tfdml.compression, codec)()
strategy = tfdml.MultiWorkerMirroredStrategy(compression=compression)
dataset = tfdml.data.read_tfrecords("data", 32, label="y", features=["x"], seed=1)
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(directory)
fitted = model.fit(dataset, epochs=epochs, verbose=0, callbacks=[checkpoint])
weights = np.concatenate([w.ravel() for w in model.get_weights()])
report = {
    "size": strategy.size,
    "losses": fitted.history["loss"],
    "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    "norm": float(np.linalg.norm(weights)),
    "tfdml": tfdml.__file__,
    "compiled": library.load() is not None,
}
print(json.dumps(report), flush=True)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """Returns a PATH with the tools' commands and no compiler."""
    directory = tmp_path_factory.mktemp("bin")
    for name in COMMANDS:
        found = next(Path(p) / name for p in os.get_exec_path() if (Path(p) / name).exists())
        (directory / name).symlink_to(found)
    return str(directory)


@pytest.fixture(scope="module")
def wheel(path, tmp_path_factory) -> Path:
    """Returns the wheel built by `tools/wheel` in a fresh clone without `tools/bootstrap`."""
    checkout = copy_of_the_checkout(tmp_path_factory.mktemp("wheel") / "a checkout")
    done = run([str(checkout / "tools" / "wheel")], path, PYTHON=base_python())
    assert done.returncode == 0, done.stdout + done.stderr
    # Twine's output on the sdist and on the wheel.
    assert done.stdout.count("PASSED") == 2
    (built,) = (checkout / "dist").glob("tfdml-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, path, tmp_path_factory) -> str:
    """Returns the PATH of a new environment in which only the wheel is installed."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([base_python(), "-m", "venv", str(home)], check=True, timeout=120)
    environment = f"{home / 'bin'}:{path}"
    done = run(["pip", "install", "--quiet", f"{wheel}[cpu]"], environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert run(["pip", "check"], environment).returncode == 0
    return environment


@pytest.fixture(scope="module")
def project(installed, tmp_path_factory) -> Path:
    """Returns a user's directory: a script, and records made by `tfdml records`."""
    home = tmp_path_factory.mktemp("project")
    (home / "train.py").write_text(TRAIN)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(200, 20)).astype(np.float32)
    np.savez(home / "arrays.npz", x=x, y=x.sum(axis=1))
    done = run(["tfdml", "records", "convert", "arrays.npz", "-o", "data"], installed, cwd=home)
    assert done.returncode == 0, done.stderr
    assert "200 in = 200 written + 0 rejected" in done.stdout
    return home


def base_python() -> str:
    return str(Path(sys.base_prefix) / "bin" / "python3")


def run(command: list[str], path: str, timeout: float = 300, cwd: Path | None = None, **variables):
    """Runs a command with only the home and pip's settings of this environment."""
    inherited = {
        name: v for name, v in os.environ.items() if name == "HOME" or name.startswith("PIP_")
    }
    command = ["env", f"PATH={path}", *command]
    return subprocess.run(
        command,
        cwd=cwd or "/",
        env={**inherited, **variables, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(project: Path, installed: str, workers: int, *arguments: str) -> list[dict]:
    """Trains with `tfdml launch`; returns each worker's output."""
    command = ["tfdml", "launch", "--workers", str(workers), "train.py", *arguments]
    done = run(command, installed, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    json_lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"size"' in line]
    return [json.loads(text) for text in json_lines]


def test_two_workers_from_the_wheel_equal_one(project, installed):
    (alone,) = train(project, installed, 1, "none", "one", "2")
    two = train(project, installed, 2, "none", "two", "2")
    assert [worker["size"] for worker in two] == [2, 2]
    assert len({worker["digest"] for worker in two}) == 1
    for worker in two:
        np.testing.assert_allclose(worker["losses"], alone["losses"], rtol=1e-5)
        np.testing.assert_allclose(worker["norm"], alone["norm"], rtol=1e-5)
        # The trained package is the installed one.
        assert str(Path(worker["tfdml"]).parents[4]) in installed


def test_compressed_with_a_checkpoint(project, installed):
    """A codec runs without its compiled operations; a second run resumes with the same bits."""
    whole = train(project, installed, 2, "PowerSGD", "whole", "3")
    train(project, installed, 2, "PowerSGD", "parts", "2")
    parts = train(project, installed, 2, "PowerSGD", "parts", "3")
    assert len({worker["digest"] for worker in [*whole, *parts]}) == 1
    assert not any(worker["compiled"] for worker in [*whole, *parts])
    assert whole[0]["losses"][-1] < whole[0]["losses"][0]


def test_records_name_the_package_that_is_missing(project, installed):
    (project / "table.parquet").write_bytes(b"PAR1")
    done = run(
        ["tfdml", "records", "convert", "table.parquet", "-o", "other"], installed, cwd=project
    )
    assert done.returncode == 1
    assert done.stderr == (
        "tfdml records convert: Reading Parquet needs the package pyarrow. Received: No module "
        "named 'pyarrow'. Install it: pip install 'tfdml[records]'.\n"
    )


def test_advice_of_the_message_works(project, installed):
    """Runs last: it changes the environment."""
    done = run(["pip", "install", "--quiet", "tfdml[records]"], installed, timeout=900)
    assert done.returncode == 0, done.stderr
    table = "pyarrow.table({'id': [1, 2]})"
    code = f"import pyarrow.parquet; pyarrow.parquet.write_table({table}, 'a.parquet')"
    assert run(["python", "-c", code], installed, cwd=project).returncode == 0
    done = run(["tfdml", "records", "convert", "a.parquet", "-o", "third"], installed, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "2 in = 2 written" in done.stdout
