"""The robust rules in NumPy, number by number and rank by rank, for gradients of all weights."""

import numpy as np


def trimmed_mean(means: np.ndarray, weights: np.ndarray, trimmed: int) -> np.ndarray:
    """Returns the trimmed mean of `[ranks, numbers]`, weighted; 0 where nothing is left."""
    present = [rank for rank in range(len(weights)) if weights[rank] > 0]
    result = np.zeros(means.shape[1:], means.dtype)
    for number in range(means.shape[1]):
        own = means[:, number]
        order = sorted(present, key=lambda rank: own[rank] if np.isfinite(own[rank]) else np.inf)
        kept = order[trimmed : len(order) - trimmed]
        if kept:
            result[number] = np.average(own[kept], weights=weights[kept]) * weights.sum()
    return result


def centered_clipping(
    means: np.ndarray, weights: np.ndarray, center: np.ndarray, radius: float, iterations: int
) -> np.ndarray:
    """Returns the center moved by the ranks' clipped differences; ranks not finite are left out."""
    for _ in range(iterations):
        moved = center.copy()
        for mean, weight in zip(means, weights, strict=True):
            apart = mean - center
            if weight > 0 and np.isfinite(apart).all():
                moved += weight * apart * min(1.0, radius / max(np.linalg.norm(apart), 1e-30))
        center = moved
    return center


class Momentum:
    """Each rank's average of its gradients over steps.

    Args:
        factor: Factor of the average so far.
    """

    def __init__(self, factor: float):
        self._factor, self._averages = factor, None

    def __call__(self, means: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Returns the averages after a step; a rank without rows keeps its own."""
        if self._averages is None:
            self._averages = np.zeros_like(means)
        after = self._factor * self._averages + (1 - self._factor) * means
        self._averages = np.where(weights[:, None] > 0, after, self._averages)
        return self._averages
