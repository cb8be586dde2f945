"""Reference optimizers in NumPy, from the papers' formulas and reference implementations."""

from collections.abc import Callable, Sequence

import numpy as np

norm = np.linalg.norm


def lamb(
    weights: Sequence[np.ndarray],
    gradients: Sequence[Sequence[np.ndarray]],
    rates: Sequence[float],
    decays: Sequence[bool],
    adapts: Sequence[bool],
    weight_decay: float = 0.0,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    bias_correction: bool = True,
    global_clipnorm: float | None = None,
    trust_ratio_clip: float = np.inf,
) -> list[np.ndarray]:
    """You et al., algorithm 2; returns the weights after the last step."""
    weights = [w.copy() for w in weights]
    means = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    for t, (step, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        total = np.sqrt(sum((g**2).sum() for g in step))
        for i, (w, g) in enumerate(zip(weights, step, strict=True)):
            if global_clipnorm is not None:
                g = g * min(1.0, global_clipnorm / total)
            m, v = means[i]
            m = beta_1 * m + (1 - beta_1) * g
            v = beta_2 * v + (1 - beta_2) * g**2
            means[i] = m, v
            if bias_correction:
                m, v = m / (1 - beta_1**t), v / (1 - beta_2**t)
            u = m / (np.sqrt(v) + epsilon) + (weight_decay * w if decays[i] else 0)
            ratio = norm(w) / norm(u) if adapts[i] and norm(w) > 0 and norm(u) > 0 else 1.0
            weights[i] = w - rate * min(ratio, trust_ratio_clip if adapts[i] else np.inf) * u
    return weights


def lars(
    weights: Sequence[np.ndarray],
    gradients: Sequence[Sequence[np.ndarray]],
    rates: Sequence[float],
    decays: Sequence[bool],
    adapts: Sequence[bool],
    rule: Callable,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    trust_coefficient: float = 0.001,
    trust_denominator: str = "joint",
    epsilon: float = 0.0,
    nesterov: bool = False,
) -> list[np.ndarray]:
    """Runs steps of a `rule`, one of the functions below."""
    weights = [w.copy() for w in weights]
    momenta = [np.zeros_like(w) for w in weights]
    for step, rate in zip(gradients, rates, strict=True):
        for i, (w, g) in enumerate(zip(weights, step, strict=True)):
            decay = weight_decay if decays[i] else 0.0

            def ratio(update, i=i, w=w, g=g, decay=decay):
                zero = norm(w) == 0 or norm(g if trust_denominator == "separate" else update) == 0
                if zero or not adapts[i]:
                    return 1.0
                if trust_denominator == "separate":
                    return trust_coefficient * norm(w) / (norm(g) + decay * norm(w) + epsilon)
                return trust_coefficient * norm(w) / norm(update)

            d = g + decay * w
            weights[i], momenta[i] = rule(w, d, momenta[i], rate, ratio, momentum, nesterov)
    return weights


def classic(w, d, b, rate, ratio, momentum, nesterov):
    """Rate and ratio inside the momentum: Model Garden's `classic_momentum=True`, MLPerf."""
    scaled = rate * ratio(d) * d
    b = momentum * b + scaled
    return w - (momentum * b + scaled if nesterov else b), b


def popular(w, d, b, rate, ratio, momentum, nesterov):
    """Both outside of the momentum, with the ratio of the update: `classic_momentum=False`."""
    b = momentum * b + d
    update = momentum * b + d if nesterov else b
    return w - rate * ratio(update) * update, b


def corrected(w, d, b, rate, ratio, momentum, nesterov):
    """Goyal et al., equation 10: b times new rate / old rate; here w is (w, old rate)."""
    scaled = ratio(d) * d
    b = momentum * b + scaled
    return w - rate * (momentum * b + scaled if nesterov else b), b


def row_wise_adagrad(
    weights: np.ndarray,
    gradients: Sequence[np.ndarray],
    rate: float,
    initial: float,
    epsilon: float,
) -> np.ndarray:
    """DLRM's rule: an accumulator for each row, of the mean of its squares."""
    weights, sums = weights.copy(), np.full(len(weights), initial)
    for g in gradients:
        sums += (g**2).mean(1)
        weights -= rate * g / (np.sqrt(sums) + epsilon)[:, None]
    return weights


def lazy_adam(
    weights: np.ndarray,
    steps: Sequence[tuple[np.ndarray, np.ndarray]],
    rate: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    amsgrad: bool,
) -> np.ndarray:
    """Adam, with Keras's epsilon, of the rows that a step has looked up."""
    weights = weights.copy()
    m, v, largest = (np.zeros_like(weights) for _ in range(3))
    for t, (looked_up, g) in enumerate(steps, start=1):
        alpha = rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        for i in set(looked_up.tolist()):
            m[i] = beta_1 * m[i] + (1 - beta_1) * g[i]
            v[i] = beta_2 * v[i] + (1 - beta_2) * g[i] ** 2
            largest[i] = np.maximum(largest[i], v[i])
            weights[i] -= alpha * m[i] / (np.sqrt(largest[i] if amsgrad else v[i]) + epsilon)
    return weights
