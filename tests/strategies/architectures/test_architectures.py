"""Checks that common architectures equal one replica, and resume under other strategies."""

import pickle
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.harness import side_environment
from tests.strategies.architectures import cases as cases
from tests.strategies.compare import assert_close, assert_invariant

# No layer computes in float32; the tolerance is for float64's rounding.
EXACT = {"rtol": 1e-9, "atol": 1e-9}
# These keep weights in float32.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# Three devices share 8 rows as 3, 3 and 2. Two processes trace in parallel, and cost less.
DEFAULT = {
    "decoder": ("mirrored", 3),
    "resnet": ("horovod", 2),
}
JOBS = [("mirrored", 2), ("mirrored", 3), ("horovod", 2), ("multi_worker", 2)]


@pytest.mark.parametrize(
    ("architecture", "kind", "size"),
    [
        (name, *job) if DEFAULT.get(name) == job else _slow(name, *job)
        for name in cases.ARCHITECTURES
        for job in JOBS
    ],
)
def test_replicas_equal_one_process(ranks, architecture, kind, size):
    assert_invariant(ranks.run_sizes((1, size), cases.train, architecture, kind=kind), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "horovod", "multi_worker"])
@pytest.mark.parametrize(
    "data",
    [
        "arrays",
        "of-unknown-length",
        "sent-by-rank-0",
        "of-two-calls",
        "of-two-calls-on-batches",
    ],
)
def test_unequal_shares(ranks, data, kind):
    case = (cases.train_on_unequal_shares, data)
    assert_invariant(ranks.run_sizes((1, 2), *case, kind=kind, timeout=60), **EXACT)


@pytest.mark.slow
def test_recipe_of_synchronized_batch_norm(ranks):
    """Rank 0 prints the output of one process."""
    (alone,), (first, second) = (ranks(size).run(cases.run_recipe) for size in (1, 2))
    losses = [re.findall(r"loss: ([0-9.]+)\n", output) for output in (alone, first)]
    assert len(losses[0]) == 3, alone
    np.testing.assert_allclose(*np.array(losses, float), rtol=1e-3)
    assert "loss" not in second


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("Adagrad", {"learning_rate": 0.1, "clipnorm": 0.1}),
        _slow("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "clipvalue": 0.01}),
        _slow("Adadelta", {"learning_rate": 1.0}),
        _slow("Adafactor", {"learning_rate": 0.1}),
        _slow("Adam", {"learning_rate": 0.01, "amsgrad": True, "use_ema": True}),
        _slow("Adamax", {"learning_rate": 0.01}),
        _slow("Ftrl", {"learning_rate": 0.1}),
        _slow("Lamb", {"learning_rate": 0.01}),
        _slow("Lion", {"learning_rate": 0.001}),
        _slow("MultiOptimizer", None),
        _slow("Muon", {"learning_rate": 0.01}),
        _slow("Nadam", {"learning_rate": 0.01, "global_clipnorm": 0.5}),
        _slow("RMSprop", {"learning_rate": 0.01, "momentum": 0.5, "centered": True}),
        _slow("ScheduleFreeAdamW", {"learning_rate": 0.01}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_optimizers_with_tables(ranks, optimizer, options):
    """A batch looks up embedding rows repeatedly, on one replica and on several."""
    case = (cases.train, "recommender", optimizer, options)
    assert_invariant(ranks.run_sizes((1, 2), *case, kind="mirrored"), **EXACT)


# Plain Keras squares each part of a repeated row's gradient, also for norms: SGD uses none.
SGD = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    ("architecture", "optimizer", "options"),
    [
        ("recommender", "SGD", SGD),
        _slow("time_series", "AdamW", None),
        _slow("decoder", "SGD", SGD),
        _slow("unet", "AdamW", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["mirrored", _slow("horovod")])
def test_saved_models_resume(ranks, tmp_path, kind, architecture, optimizer, options):
    """Resumes in plain Keras and in a strategy's scope, with the optimizer's state."""
    path = str(tmp_path / "model.keras")
    here = ranks(2, kind).run(cases.save_and_go_on, architecture, optimizer, options, path)
    (plain,) = ranks(1).run(cases.load_and_go_on, architecture, path, False)
    assert_close(plain, here[0], **EXACT)
    for again in ranks(2, kind).run(cases.load_and_go_on, architecture, path, True):
        assert_close(plain, again, **EXACT)


@pytest.mark.parametrize(
    ("architecture", "quantized"),
    [("recommender", False), _slow("recommender", True), _slow("encoder", False)],
    ids=["float32-weights-of-lora", "float32-weights-of-lora-int8", "float32-weights-of-attention"],
)
def test_lora(ranks, architecture, quantized):
    results = ranks.run_sizes((1, 2), cases.adapt, architecture, quantized, kind="mirrored")
    assert_invariant(results, **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["recommender", "encoder"])
def test_quantized(ranks, architecture):
    results = ranks.run_sizes((1, 2), cases.quantize, architecture, kind="mirrored")
    assert_invariant(results, **EXACT)


@pytest.mark.parametrize("losses", ["objects", _slow("default")])
def test_distillation(ranks, losses):
    """With `keras.losses` objects, and with functions, whose means `Distiller` computes."""
    results = ranks.run_sizes((1, 2), cases.distill, losses, kind="mirrored")
    assert_invariant(results, **EXACT)


# KerasHub's models, by the part that computes in float32 under any policy.
HUB = {
    "gpt2": None,
    "llama": "LlamaLayerNorm",
    "gemma": "RMSNormalization",
    "bert": None,
    "bart": None,
    "t5": "losses",
    "vit": None,
    "retinanet": None,
}


@pytest.fixture(scope="module")
def hub_python() -> Path:
    """Returns a Python with KerasHub; its environment is created on first use."""
    return side_environment.hub_python()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        pytest.param(
            model,
            FLOAT32 if in_float32 else EXACT,
            id=f"{model}-float32-{in_float32}" if in_float32 else model,
        )
        for model, in_float32 in HUB.items()
    ],
)
def test_kerashub(hub_python, tmp_path, model, tolerance):
    """Compares 2 and 3 devices of one process with 1, each in a separate process."""
    result = tmp_path / "result"
    subprocess.run(
        [hub_python, "-m", "tests.strategies.architectures.hub_program", model, result],
        cwd=side_environment.ROOT,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=600,
    )
    assert_invariant(pickle.loads(result.read_bytes()), **tolerance)
