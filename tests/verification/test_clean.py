"""Runs `tfdml verify` on recipes as they are: nothing may be found in them."""

import json

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_found_in_a_recipe(tfdml_command, tmp_path, recipe):
    file = tmp_path / "answer.json"
    done = tfdml_command(
        "verify", "--steps", "3", "--json", str(file), f"recipes/{recipe}", *RECIPES[recipe],
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(file.read_text())
    assert answer["same"]
    assert answer["steps"] == 3
