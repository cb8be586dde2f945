"""Checks the robust rules against NumPy, and what they promise."""

import numpy as np
import pytest
import tensorflow as tf

from tests.aggregation import numpy_rules
from tfdml.aggregation import CenteredClipping, TrimmedMean

EQUAL = np.full(5, 0.2, np.float32)
UNEQUAL = np.array([0.4, 0.1, 0.0, 0.3, 0.2], np.float32)


def _means(seed: int = 0) -> np.ndarray:
    """Returns five ranks' gradients; that of a rank without rows is 0 in `UNEQUAL`."""
    return np.random.default_rng(seed).normal(size=(5, 301)).astype("float32")


def _trimmed(means: np.ndarray, weights: np.ndarray, trimmed: int) -> tuple[np.ndarray, np.ndarray]:
    values, cut = TrimmedMean(trimmed).combine(tf.constant(means), tf.constant(weights))
    return values.numpy(), cut.numpy()


def _clipped(
    means: np.ndarray, weights: np.ndarray, center: np.ndarray, radius: float, iterations: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    apart = (means - center).astype("float64")
    rule = CenteredClipping(radius, iterations=iterations)
    coefficients, cut = rule.coefficients(
        tf.constant(apart @ apart.T), tf.constant(weights.astype("float64"))
    )
    return center + coefficients.numpy() @ apart, cut.numpy()


@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("trimmed", [0, 1])
def test_trimmed_mean_is_that_of_numpy(weights, trimmed):
    means = _means()
    expected = numpy_rules.trimmed_mean(means, weights, trimmed)
    np.testing.assert_allclose(_trimmed(means, weights, trimmed)[0], expected, atol=1e-6)


@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_centered_clipping_is_that_of_numpy(weights, iterations):
    means, center = _means(), _means(1)[0]
    means[3] *= 20
    # Between the lengths of the ranks' differences, so that some are clipped.
    expected = numpy_rules.centered_clipping(means, weights, center, 25.0, iterations)
    values, cut = _clipped(means, weights, center, 25.0, iterations)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    assert cut[3] > 0.9
    assert cut[0] < 0.2


def test_nothing_is_left_out_of_the_mean():
    means = _means()
    mean = UNEQUAL @ means
    np.testing.assert_allclose(_trimmed(means, UNEQUAL, 0)[0], mean, atol=1e-6)
    values, cut = _clipped(means, UNEQUAL, np.zeros(301, np.float32), float("inf"))
    np.testing.assert_allclose(values, mean, atol=1e-6)
    assert not cut.any()


@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_ranks_changes_nothing(seed):
    means, order = _means(seed), np.random.default_rng(seed).permutation(5)
    for rule in (
        lambda m, w: _trimmed(m, w, 1)[0],
        lambda m, w: _clipped(m, w, np.zeros(301, np.float32), 12.0)[0],
    ):
        permuted = rule(means[order], UNEQUAL[order])
        np.testing.assert_allclose(rule(means, UNEQUAL), permuted, atol=1e-6)


@pytest.mark.parametrize("wrong", [1e30, -1e30, np.inf, -np.inf, np.nan])
def test_a_wrong_rank_stays_within_the_others(wrong):
    means = _means()
    others = np.delete(means, 2, 0)
    means[2] = wrong
    values, cut = _trimmed(means, EQUAL, 1)
    assert (values <= others.max(0)).all()
    assert (values >= others.min(0)).all()
    assert cut[2] == 1


def test_more_wrong_ranks_than_allowed_are_seen():
    means = _means()
    means[1:3] = np.nan
    assert not np.isfinite(_trimmed(means, EQUAL, 1)[0]).any()
    assert not np.isfinite(_trimmed(means, UNEQUAL, 0)[0]).any()


def test_a_batch_on_too_few_ranks_gives_nothing():
    weights = np.array([0.5, 0.5, 0, 0, 0], np.float32)
    assert not _trimmed(_means(), weights, 1)[0].any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrimmedMean(-1), "num_byzantine=-1"),
        (lambda: TrimmedMean(1.5), "num_byzantine=1.5"),
        (lambda: CenteredClipping(0), "radius=0"),
        (lambda: CenteredClipping(1.0, momentum=1.0), "momentum=1.0"),
        (lambda: CenteredClipping(1.0, iterations=0), "iterations=0"),
        (lambda: TrimmedMean(1).check_ranks(2), "for 2 ranks"),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(ValueError, match=f"Received: .*{words}"):
        make()


def test_a_single_rank_is_taken_as_it_is():
    TrimmedMean(1).check_ranks(1)
    values, _ = _trimmed(_means()[:1], np.ones(1, np.float32), 1)
    np.testing.assert_array_equal(values, _means()[0])
