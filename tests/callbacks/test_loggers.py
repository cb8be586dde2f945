"""Checks that loggers of other packages run on rank 0 only, and see the history of `fit`."""

import json
import subprocess
from pathlib import Path

import keras
import pytest

import tfdml
from tests.callbacks import logger_cases as cases
from tests.harness import side_environment

PACKAGES = [
    "aim.keras",
    "clearml.binding.frameworks",
    "comet_ml.integration.keras",
    "mlflow.keras.callback",
    "neptune_tensorflow_keras",
    "swanlab.integration.keras",
    "tensorboard.plugins.hparams.keras",
    "trackio.keras",
    "wandb.integration.keras",
]
CALLS = ["train", "epoch ['accuracy', 'loss']", "epoch ['accuracy', 'loss']", "test", "predict"]


def test_loggers_run_on_rank_0_only(ranks):
    """The other rank still runs other callbacks, even of modules with the same name prefix."""
    chief, other = ranks(2).run(cases.called, [*PACKAGES, "train", "wandbox"])
    assert chief == dict.fromkeys([*PACKAGES, "train", "wandbox", "ChiefOnly"], CALLS)
    assert {name for name, calls in other.items() if calls} == {"train", "wandbox"}


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("mlflow", "A run of MLflow is active on rank 1.*`mlflow.autolog()`"),
        ("wandb", "A run of Weights & Biases is active on rank 1.*`wandb.init()`"),
    ],
)
def test_active_run_on_another_rank_warns(ranks, package, message):
    chief, other = ranks(2).run(cases.warned_of, package)
    assert chief == []
    (warning,) = other
    first, second = message.split(".*")
    assert warning.startswith(first)
    assert second in warning


def test_chief_only_in_plain_keras(ranks):
    (calls,) = ranks(1).run(cases.plain)
    assert calls == ["train", "epoch ['loss']"]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (keras.callbacks.ReduceLROnPlateau(), "must only observe .* ReduceLROnPlateau, which must"),
        (lambda: None, "must be a Keras callback. Received: .*function"),
    ],
    ids=["all ranks", "no callback"],
)
def test_chief_only_rejects_wrong_callbacks(callback, message):
    with pytest.raises(ValueError, match=message):
        tfdml.callbacks.ChiefOnly(callback)


def test_chief_only_rejects_tfdml_callbacks():
    with pytest.raises(ValueError, match="FaultTolerantCheckpoint, which must run on all ranks"):
        tfdml.callbacks.ChiefOnly(tfdml.callbacks.FaultTolerantCheckpoint("run"))


@pytest.fixture(scope="module")
def python() -> Path:
    """Returns a Python with MLflow and Weights & Biases, installed on first use."""
    return side_environment.loggers_python()


def _run(python: Path, *arguments: str) -> str:
    return subprocess.run(
        [python, "-m", *arguments],
        cwd=side_environment.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "runs"),
    [("mlflow", 1), ("mlflow-autolog", 2), ("wandb", 1), ("wandb-everywhere", 2)],
)
def test_real_loggers(python, tmp_path, kind, runs):
    """One run with the history's numbers; a warning if the program begins one on each rank."""
    program = "tests.callbacks.logger_program"
    _run(python, "tfdml.cli.main", "launch", "--workers", "2", "-m", program, kind, str(tmp_path))
    chief, other = (json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2))
    library = kind.partition("-")[0]
    logged = json.loads(_run(python, program, f"read-{library}", str(tmp_path)))
    assert len(logged) == runs
    name = {"mlflow": "loss", "wandb": "epoch/loss"}[library]
    (losses,) = [run[name] for run in logged if name in run]
    assert losses == pytest.approx(chief["history"]["loss"], rel=1e-12)
    assert chief["warned"] == []
    assert len(other["warned"]) == runs - 1
