"""Checks Ray Train, Data and Tune on a real local cluster, against the same on one process."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.docs import pages
from tests.harness import side_environment
from tests.harness.command import run_python

pytestmark = pytest.mark.slow

PROGRAM = "tests.integrations.ray_program"
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> str:
    """Returns a Python with Ray, installed on first use."""
    return str(side_environment.ray_python())


@pytest.fixture
def run(python, tmp_path) -> Run:
    """Returns a function that runs a case of the program, and returns what rank 0 has seen."""
    return lambda case: _run(python, case, tmp_path)


@pytest.fixture(scope="module")
def alone(python, tmp_path_factory) -> dict[str, Any]:
    """Returns what one process without Ray sees, by the name of the case."""
    return _run(python, "alone", tmp_path_factory.mktemp("alone"))


def _run(python: str, case: str, directory: Path) -> dict[str, Any]:
    root = str(side_environment.ROOT)
    ran = run_python(
        "-m", PROGRAM, case, str(directory), python=python, timeout=600, PYTHONPATH=root
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return json.loads(Path(directory, f"{case}.json").read_text())


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    for own, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["numbers", "horovod"])
def test_two_workers_have_the_numbers_of_one_process(run, alone, case):
    """Also where Keras 3 was switched off for all workers; rank 0's model is in the reports."""
    found = run(case)
    assert_equal(found, alone["numbers"])
    assert (found["size"], found["rank"], found["keras"][0]) == (2, 0, "3")
    assert [report["epoch"] for report in found["reports"]] == [1, 2, 3]
    assert [report["loss"] for report in found["reports"]] == found["loss"]
    weights = keras.models.load_model(found["model"]).get_weights()
    for own, other in zip(weights, found["weights"], strict=True):
        np.testing.assert_array_equal(own, np.float32(other))


def test_a_killed_worker_resumes_within_the_epoch(run, alone, tmp_path):
    """Killed after step 7; a checkpoint was saved after step 6, the first one of epoch 1."""
    found = run("killed")
    assert int(Path(tmp_path, "event").read_text()) > 0
    assert found["first"] == [1, 1]
    assert_equal(found, alone["numbers"])


def test_a_second_worker_joins_within_the_epoch(run, alone):
    found = run("grown")
    assert (found["size"], found["first"]) == (2, [1, 1])
    assert_equal(found, alone["numbers"])


def test_all_ranks_save_before_a_node_is_preempted(run, alone):
    """Nothing else saves: the rank that is left continues after what the notice has saved."""
    found = run("preempted")
    epoch, step = found["first"]
    assert found["size"] == 1
    assert 5 * epoch + step >= 7
    assert_equal(found, alone["preempted"])


def test_ray_data_in_uneven_parts_is_used_once(run, alone):
    """Workers have 80 and 120 rows: the global batches are 48, 48, 48, 32 and 24 rows."""
    assert_equal(run("data"), alone["data"])


def test_a_search_finds_the_better_rate(run, alone):
    found = run("search")
    assert (found["trials"], found["errors"], found["rate"]) == (2, 0, 0.1)
    assert found["loss"] == pytest.approx(alone["search"]["loss"][-1], rel=1e-5)
    assert Path(found["model"]).exists()


def test_the_page_runs(python, tmp_path):
    """The first block of the page is a whole program."""
    page = side_environment.ROOT / "docs" / "ray.md"
    first = next(block for block in pages.blocks(page) if block.language == "python")
    Path(tmp_path, "train.py").write_text(first.text)
    ran = run_python(
        str(tmp_path / "train.py"), python=python, timeout=600,
        PYTHONPATH=str(side_environment.ROOT), HOME=str(tmp_path), RAY_ADDRESS="local",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert ran.stdout.startswith("{'epoch': 3, 'loss': ")


def test_importing_the_package_imports_no_tensorflow(python):
    """So that the backend can switch Keras 3 on before a worker imports it."""
    code = "import sys, tfdml.integrations.ray; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([python, "-c", code], cwd=side_environment.ROOT, check=True)
