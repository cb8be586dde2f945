"""The rate of MLPerf's large-batch recipes: a line up, and a parabola down."""

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
    """Returns a linear warm-up and a polynomial decay, as MLPerf's ResNet-50 with LARS uses.

    After the warm-up it is `end + (peak - end) (1 - x)^power`, where x goes from 0 at step
    `warmup_steps` to 1 at step `total_steps + 1`, so that the last step of training still moves.

    Args:
        peak: The highest rate, at step `warmup_steps`.
        total_steps: The steps of the whole training.
        warmup_steps: The steps of the warm-up, of these.
        end: The rate at the end.
        power: 2 for a parabola, 1 for a line (as BERT's recipes use).
        start: The rate of the first step.

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
