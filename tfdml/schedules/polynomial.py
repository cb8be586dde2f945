"""The learning rate of MLPerf's large-batch recipes: linear warm-up, then polynomial decay."""

import keras

from tfdml.schedules.warmup import LinearWarmup


def polynomial_decay(
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    end: float = 0.0001,
    power: float = 2.0,
    start: float = 0.0,
) -> LinearWarmup:
    """Returns a linear warm-up and a polynomial decay, as in MLPerf's ResNet-50 with LARS.

    After the warm-up the rate is `end + (peak - end) (1 - x)^power`, where x goes from 0 at step
    `warmup_steps` to 1 at step `total_steps + 1`, so that the last step still has an effect.

    Args:
        peak: Highest learning rate, at step `warmup_steps`.
        total_steps: Steps of the whole training, including the warm-up.
        warmup_steps: Steps of the warm-up.
        end: Learning rate at the end.
        power: Exponent: 2 for a parabola, 1 for a line (as in BERT's recipes).
        start: Learning rate of the first step.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        mlcommons/training, image_classification/tensorflow2/lars_util.py.
    """
    if total_steps <= warmup_steps:
        raise ValueError(
            "`total_steps` must be more than `warmup_steps`. Received: "
            f"total_steps={total_steps}, warmup_steps={warmup_steps}."
        )
    decay = keras.optimizers.schedules.PolynomialDecay(
        peak, total_steps - warmup_steps + 1, end, power
    )
    return LinearWarmup(decay, warmup_steps, start)
