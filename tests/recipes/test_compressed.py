"""Checks the recipe of compressed training."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.command import ROOT, run_python

RECIPE = ["recipes/compressed.py", "--data", "digits", "--epochs", "2"]


@pytest.mark.slow
def test_on_one_process_nothing_is_sent():
    done = run_python(*RECIPE, "--compression", "int8")
    assert done.returncode == 0, done.stderr
    assert "accuracy with int8:" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["auto", "powersgd"])
def test_on_two_processes(compression):
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [sys.executable, horovodrun, "-np", "2", sys.executable, *RECIPE]
    done = subprocess.run(
        [*command, "--compression", compression],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"accuracy with {compression}:" in done.stdout
    assert ("Predicted for a step's exchange" in done.stdout) == (compression == "auto")
