"""Checks the recipe for Spark on a real cluster: two executors on this machine, one task each."""

import json
import shutil

import numpy as np
import pytest

from tests.harness import side_environment
from tests.harness.command import ROOT, run_python

pytestmark = pytest.mark.slow

CLUSTER = "local-cluster[2,1,1024]"
PATHS = {"PYTHONPATH": f"{ROOT / 'recipes'}:{ROOT}"}


def run_on_spark(*arguments: str, timeout: float = 900) -> str:
    """Runs a program with Spark; returns what it prints."""
    if not shutil.which("java"):
        pytest.skip("needs a Java, as of Debian's default-jre-headless")
    python = str(side_environment.spark_python())
    # The machine's name may be that of an address which its processes cannot reach.
    local = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": python}
    done = run_python(*arguments, python=python, timeout=timeout, **PATHS, **local)
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


def test_two_tasks_give_the_numbers_of_one_process(tmp_path):
    """Of the recipe, whose model comes back to the driver."""
    options = ["--data", "digits", "--limit", "300", "--epochs", "2"]
    file = tmp_path / "model.keras"
    printed = run_on_spark("recipes/spark.py", "--master", CLUSTER, *options, "--output", str(file))
    assert "2 tasks, loss " in printed
    alone = (
        "import sys, json, images, spark\n"
        "import keras, numpy as np\n"
        "data = images.load('digits').limited(300)\n"
        "size, history, weights = spark.train(data.x, data.y, epochs=2, batch_size=128)\n"
        f"on_spark = keras.models.load_model({str(file)!r}).get_weights()\n"
        "differences = [float(np.abs(a - b).max()) for a, b in zip(weights, on_spark)]\n"
        "print(json.dumps([size, history['loss'][-1], max(differences)]))\n"
    )
    done = run_python("-c", alone, timeout=400, **PATHS)
    assert done.returncode == 0, done.stderr
    size, loss, difference = json.loads(done.stdout.splitlines()[-1])
    assert size == 1
    assert f"loss {loss:.4f}" in printed
    assert difference < 1e-6


def test_jobs_one_after_the_other_and_a_rank_that_fails():
    report = json.loads(run_on_spark("-m", "tests.recipes.spark_program").splitlines()[-1])
    (size, losses, weights, process), (_, again, weights_again, other_process) = report["jobs"]
    assert size == 2
    assert losses == again
    assert losses[1] < losses[0]
    np.testing.assert_array_equal(np.concatenate(weights), np.concatenate(weights_again))
    assert process != other_process
    assert report["error"]
    reports = [log for log in report["logs"] if "because rank 1 raised an exception" in log]
    assert reports, "The rank that waited names the one that failed."
    assert all("ValueError: a callback's mistake" in log for log in reports)
    assert report["seconds"] < 300
