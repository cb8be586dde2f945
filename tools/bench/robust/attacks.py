"""What wrong workers send, from what they know of the honest ones' gradients.

References:
    Baruch et al., "A Little Is Enough", arXiv:1902.06156. Xie et al., "Fall of Empires",
    arXiv:1903.03936 (inner product manipulation). Karimireddy et al., arXiv:2006.09365 (mimic).
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

WORKERS, HONEST = 25, 20
ATTACKS = ("none", "ALIE", "sign flip", "IPM", "label flip", "mimic")
_IPM = 0.1


class Known(NamedTuple):
    """What wrong workers know of the honest gradients of a step, each a list of tensors or arrays.

    Attributes:
        mean: Their mean.
        square: The mean of their squares.
        first: The first honest worker's gradient.
    """

    mean: list
    square: list
    first: list


def wrong_gradient(attack: str, own: list, known: Known, sqrt: Callable, maximum: Callable) -> list:
    """Returns what a wrong worker sends.

    Args:
        attack: Name of the attack.
        own: The worker's own gradient: a list of tensors or arrays.
        known: What it knows of the others'.
        sqrt: Square root of a tensor or array.
        maximum: Maximum of two of them.
    """
    if attack == "sign flip":
        return [-gradient for gradient in own]
    if attack == "IPM":
        return [-_IPM * mean for mean in known.mean]
    if attack == "mimic":
        return list(known.first)
    if attack == "ALIE":
        return [
            mean - _deviations() * _deviation(mean, square, sqrt, maximum)
            for mean, square in zip(known.mean, known.square, strict=True)
        ]
    return list(own)


def _deviation(mean: Any, square: Any, sqrt: Callable, maximum: Callable) -> Any:
    """Returns the standard deviation of the honest gradients, as of a sample."""
    return sqrt(maximum(square - mean * mean, 0.0) * (HONEST / (HONEST - 1)))


def _deviations() -> float:
    """Returns how many standard deviations enough honest workers are away from the mean."""
    needed = WORKERS // 2 + 1 - (WORKERS - HONEST)
    return statistics.NormalDist().inv_cdf((HONEST - needed) / HONEST)
