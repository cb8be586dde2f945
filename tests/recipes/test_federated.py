"""Checks the recipe with Flower: means of clients' weights, secure sums, noise, and learning."""

import re

import numpy as np
import pytest

from tests.harness import side_environment
from tests.harness.command import ROOT, run_python

ROUNDS, CLIENTS, LIMIT, DEVICES = 2, 2, 300, 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> str:
    """Returns a Python with Flower; its environment is created on first use."""
    return str(side_environment.flower_python())


def run(python: str, *arguments: str) -> str:
    done = run_python(
        *arguments, python=python, timeout=500, PYTHONPATH=str(ROOT), FLWR_TELEMETRY_ENABLED="0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def simulate(python: str, *options: str) -> list[float]:
    """Returns the accuracy after each round."""
    output = run(python, "recipes/federated.py", "--data", "digits", *options)
    return [float(found) for found in re.findall(r"round \d+: accuracy (\S+)", output)]


def two_rounds(python: str, output, *options: str) -> dict[str, np.ndarray]:
    """Returns the weights after each round of two clients."""
    small = f"--rounds {ROUNDS} --clients {CLIENTS} --limit {LIMIT} --devices {DEVICES}".split()
    assert len(simulate(python, *small, "--output", str(output), *options)) == ROUNDS
    with np.load(output) as found:
        return dict(found)


@pytest.fixture(scope="module")
def by_hand(python, tmp_path_factory) -> dict[str, np.ndarray]:
    output = tmp_path_factory.mktemp("by_hand") / "weights.npz"
    numbers = map(str, (ROUNDS, CLIENTS, LIMIT, DEVICES))
    shares = run(python, "-m", "tests.recipes.federated_by_hand", str(output), *numbers)
    one, other = map(float, shares.split()[-2:])
    assert abs(one - other) > 0.05, "Else a mean without weights would pass."
    with np.load(output) as found:
        weights = dict(found)
    last = [weights[name] - weights[name.replace(f"{ROUNDS} ", "0 ")] for name in weights]
    assert max(np.abs(moved).max() for moved in last) > 0.01
    return weights


@pytest.mark.parametrize(
    ("options", "tolerances"),
    # Secure sums are rounded, and a client's training makes more of what the first one changed.
    [((), (0, 1e-6, 1e-6)), (("--secure",), (0, 5e-5, 1e-3))],
)
def test_two_rounds_are_the_mean_made_by_hand(python, by_hand, tmp_path, options, tolerances):
    found = two_rounds(python, tmp_path / "weights.npz", *options)
    assert found.keys() == by_hand.keys()
    for name, weight in by_hand.items():
        tolerance = tolerances[int(name.split()[0])]
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=tolerance, err_msg=name)
    differences = [np.abs(found[name] - by_hand[name]).max() for name in by_hand]
    assert (max(differences) > 2e-6) == bool(options)


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ((), 0.7, 1.0),
        (("--aggregation", "fedadam"), 0.7, 1.0),
        (("--secure", "--fraction", "0.7"), 0.6, 1.0),
        (("--noise", "0.02"), 0.4, 1.0),
        (("--noise", "0.02", "--secure"), 0.4, 1.0),
        # So much noise leaves nothing; guessing gives 0.1.
        (("--noise", "5"), 0.0, 0.3),
    ],
)
def test_it_learns(python, options, least, most):
    accuracies = simulate(python, "--clients", "3", "--rounds", "6", "--epochs", "2", *options)
    assert len(accuracies) == 6
    assert least <= accuracies[-1] <= most
