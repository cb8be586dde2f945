"""Runs `tfdml verify` on recipes as they are, and on KerasHub's models: nothing may be found."""

import json
import sys
from pathlib import Path

import pytest

from tests.harness import side_environment

HUB_PROGRAM = Path(__file__).with_name("hub_program.py")
RECIPES = {
    "compressed.py": ("--data", "digits"),
    "fashion_mnist.py": ("--data", "digits", "--batch-size", "100"),
    "large_batch.py": ("--data", "digits", "--batch-size", "512"),
    "own_train_step.py": (),
    "recommender.py": ("--strategy", "horovod"),  # Ids occur several times in a batch.
    "resume.py": ("checkpoints",),
    "synchronized_batch_norm.py": (),
    "transformer.py": ("--characters", "20000"),
}


@pytest.fixture
def assert_silent(tfdml_command, tmp_path):
    """Returns a function that verifies a script, and checks that nothing is found in it."""

    def check(script, *arguments, python=sys.executable):
        file = tmp_path / "answer.json"
        done = tfdml_command(
            "verify", "--steps", "3", "--json", str(file), str(script), *arguments,
            python=str(python), timeout=400, PYTHONPATH=str(side_environment.ROOT),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(file.read_text())
        assert answer["same"]
        assert answer["steps"] == 3

    return check


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_found_in_a_recipe(assert_silent, recipe):
    assert_silent(f"recipes/{recipe}", *RECIPES[recipe])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "gpt2", "retinanet"])
def test_nothing_is_found_in_a_model_of_kerashub(assert_silent, model):
    """Dropout, padding, weights of targets, a ResNet with synchronized BatchNormalization."""
    assert_silent(HUB_PROGRAM, model, python=side_environment.hub_python())
