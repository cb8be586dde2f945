"""Checks the recipes for large batches and mixed precision: equal results on two processes."""

import re

import pytest

from tests.recipes import cases

LARGE_BATCH = {
    "batch_size": 500,
    "epochs": 8,
    "learning_rate": None,
    "limit": None,
    "seed": 0,
    "log_dir": "",
    "data": "digits",
}


# The recipe's own rates are for Fashion-MNIST.
@pytest.mark.parametrize(
    ("optimizer", "rate"), [("lars", 0.2), pytest.param("adamw", 0.01, marks=pytest.mark.slow)]
)
def test_large_batch(ranks, tmp_path, optimizer, rate):
    options = {
        **LARGE_BATCH,
        "optimizer": optimizer,
        "learning_rate": rate,
        "log_dir": str(tmp_path),
    }
    chief, other = ranks(2).run(cases.run, "large_batch", options)
    accuracy = float(re.search(r"validation accuracy ([\d.]+) after 8 epochs", chief)[1])
    assert accuracy > 0.25  # Guessing gives 0.1.
    assert "Gradient noise scale" in chief
    assert other == ""
    assert list(tmp_path.glob("events*"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-linear", "sgd-warmup", "nesterov", "lamb"])
def test_large_batch_with_other_optimizers(ranks, optimizer):
    (output,) = ranks(1).run(cases.run, "large_batch", {**LARGE_BATCH, "optimizer": optimizer})
    assert f"{optimizer}, batch 500" in output


@pytest.mark.slow
def test_pipeline(ranks):
    """On two replicas of two stages each; no device has more than it may."""
    options = {
        "stages": 2,
        "memory": 12.0,
        "microbatches": 4,
        "schedule": "1f1b",
        "width": 32,
        "blocks": 2,
        "epochs": 2,
        "batch_size": 32,
        "characters": 20_000,
        "seed": 0,
    }
    chief, other = ranks(2).run(cases.run, "pipeline", options)
    assert "data 2 × pipeline 2 × shard 1" in chief
    held = [float(found) for found in re.findall(r"CPU:\d: ([\d.]+) MB of weights", chief)]
    assert len(held) == 2
    assert min(held) > 0
    bits, guessing = re.search(r"([\d.]+) bits per .* ([\d.]+) for guessing", chief).groups()
    assert float(bits) < float(guessing) - 0.3
    assert other == ""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_transformer(ranks, policy):
    options = {
        "epochs": 2,
        "batch_size": 32,
        "learning_rate": 0.02,
        "characters": 20_000,
        "policy": policy,
        "seed": 0,
    }
    chief, other = ranks(2).run(cases.run, "transformer", options)
    bits, guessing = re.search(r"([\d.]+) bits per .* ([\d.]+) for guessing", chief).groups()
    assert float(bits) < float(guessing) - 0.5
    assert other == ""
