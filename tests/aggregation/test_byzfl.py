"""Checks the rules, on simulated ranks, against those of ByzFL, in an environment of its own."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.harness.side_environment import ROOT, byzfl_python
from tfdml.aggregation import CenteredClipping, RobustRule, TrimmedMean
from tfdml.collectives.aggregator import StepGradients
from tfdml.collectives.collective import Collective
from tfdml.collectives.simulated import run_ranks
from tfdml.strategies.aggregation.robust_aggregator import RobustAggregator

STEPS, RANKS, NUMBERS = 5, 5, 600
TRIMMED, RADIUS, ITERATIONS = 1, 15.0, 3


def _combined(rule: RobustRule, steps: np.ndarray) -> np.ndarray:
    def run(collective: Collective) -> list[np.ndarray]:
        aggregator = RobustAggregator(collective, rule, bucket_bytes=1024)
        found = []
        for vectors in steps:
            own = vectors[collective.rank] / RANKS
            parts = [tf.constant(part) for part in np.split(own.astype("float32"), [100, 350])]
            given = StepGradients(parts, ["a", "b", "c"], "g")
            found.append(np.concatenate([r.numpy() for r in aggregator.aggregate(given)]))
        return found

    return np.stack(run_ranks(RANKS, run)[0])


@pytest.mark.slow
def test_results_are_those_of_byzfl(tmp_path: Path):
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(STEPS, 1, NUMBERS)) + 0.3 * rng.normal(size=(STEPS, RANKS, NUMBERS))
    steps[:, 3] *= -20
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, steps=steps, trimmed=TRIMMED, radius=RADIUS, iterations=ITERATIONS)
    program = ["-m", "tests.aggregation.byzfl_program", source, target]
    subprocess.run([byzfl_python(), *program], cwd=ROOT, check=True)
    expected = np.load(target)
    rules = {
        "trimmed": TrimmedMean(TRIMMED),
        "clipped": CenteredClipping(RADIUS, momentum=0.0, iterations=ITERATIONS),
    }
    for name, rule in rules.items():
        found = _combined(rule, steps)
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-4)
        assert np.abs(found - steps.mean(1)).max() > 0.1
