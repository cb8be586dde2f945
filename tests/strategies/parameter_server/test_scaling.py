"""Checks loss scaling with workers that take steps in parallel."""

import pytest

from tests.strategies.parameter_server import scaling_cases as cases


@pytest.mark.parametrize("kind", ["keras", "tfdml"])
def test_steps_that_overflow_are_skipped_and_the_others_are_exact(cluster, kind):
    result = cluster.run(cases.overflows, kind)
    assert result["overflows"] > 0
    assert result["iterations"] == cases.STEPS - result["overflows"]
    assert result["weight"] == result["iterations"], "unscaled by what the loss was scaled by"
    assert result["scale"] > 1.0


def test_scale_grows_when_workers_skip_the_growth_step(cluster):
    assert cluster.run(cases.counted_past_the_growth) > 1.0


def test_a_step_has_one_scale(cluster):
    result = cluster.run(cases.changed_in_the_middle, False)
    assert result == {"weight": 1.0, "scale": cases.SCALE / 8}


def test_overflow_halves_the_scale_used_in_its_step(cluster):
    """Not the scale changed by another worker: two overflows at once would halve it twice."""
    result = cluster.run(cases.changed_in_the_middle, True)
    assert result == {"weight": 0.0, "scale": cases.SCALE / 2}
