"""Checks the recipe that fine-tunes a model of KerasHub: equal results, a codec, and learning."""

import re

import pytest

from tests.harness import side_environment
from tests.harness.command import ROOT, run_python

SMALL = ("recipes/lora.py", "--characters", "60000", "--epochs", "2", "--compression")


@pytest.fixture(scope="module")
def python() -> str:
    """Returns a Python with KerasHub; its environment is created on first use."""
    return str(side_environment.hub_python())


def bits(python: str, *command: str) -> tuple[float, float]:
    """Returns the bits per character of prose, after LoRA and before."""
    done = run_python(*command, python=python, timeout=500, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(
        r"prose not seen: (\S+) bits per character, (\S+) before LoRA", done.stdout
    )
    return float(found[0]), float(found[1])


@pytest.fixture(scope="module")
def one(python) -> tuple[float, float]:
    return bits(python, *SMALL, "none")


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "tolerance"), [("none", 2e-3), ("int8", 0.05)])
def test_two_processes_tune_as_one(python, one, codec, tolerance):
    launch = ("-m", "tfdml.cli.main", "launch", "--workers", "2")
    two = bits(python, *launch, *SMALL, codec)
    assert two == pytest.approx(one, abs=tolerance)
    after, before = two
    assert after < before - 0.02
