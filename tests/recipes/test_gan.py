"""Checks the recipe of a GAN: its measure, its noise, and what it learns."""

import re

import numpy as np
import pytest

from tests.recipes import cases


@pytest.fixture(scope="module")
def recipe():
    return cases.recipe("gan")


def test_distance_of_a_shift(recipe):
    """Points that are moved by a vector: the mean length of its projections."""
    points = np.random.default_rng(1).normal(size=(200, 5, 2, 1))
    assert recipe.distance(points, points[::-1]) == 0
    moved = recipe.distance(points, points + 3.0)
    assert moved == pytest.approx(2 * recipe.distance(points, points + 1.5))
    length = 3.0 * np.sqrt(10)
    # The mean absolute coordinate of a unit vector in 10 dimensions.
    assert moved == pytest.approx(0.26 * length, rel=0.2)


def test_noise_is_new_each_epoch_and_the_same_everywhere(recipe):
    real = np.random.default_rng(0).random((50, 8, 8, 1), "float32")
    data, elsewhere = (recipe.batches(real, 20, seed=1) for _ in range(2))
    epochs = [[noise.numpy() for noise, _ in data] for _ in range(2)]
    assert [len(noise) for noise in epochs[0]] == [20, 20, 10]
    all_noise = np.concatenate([noise for epoch in epochs for noise in epoch])
    assert len(np.unique(all_noise)) == all_noise.size
    for noise, (other, _) in zip(epochs[0], elsewhere, strict=True):
        np.testing.assert_array_equal(noise, other)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("multi_worker",) * 2, ("horovod",) * 2])
def test_it_learns_on_two_processes(ranks, kind, name):
    options = {"data": "digits", "epochs": 15, "batch_size": 50, "strategy_name": name}
    chief, other = ranks(2, kind).run(cases.run, "gan", options)
    made, real, grey = map(float, re.findall(r"\d\.\d{4}", chief[chief.index("distance") :]))
    assert real < made < 0.3 * grey
    assert "distance" not in other
