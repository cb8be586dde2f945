"""A rate that rises along a line before its schedule begins."""

from typing import Any

import keras
import tensorflow as tf

Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("tfdml")
class LinearWarmup(Schedule):
    """Rises from `start` to where `target` begins, then follows `target` from its beginning.

    The target's own step 0 is at step `warmup_steps`: none of it is skipped, and a decay ends
    `warmup_steps` later. Warm-ups nest, and wrap any schedule of Keras or tfdml.

    Args:
        target: The rate to reach: a float, or a schedule.
        warmup_steps: After how many steps it is reached; 0 for at once.
        start: The rate of the first step.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
        arXiv:1706.02677, section 2.2.
    """

    def __init__(self, target: float | Schedule, warmup_steps: int, start: float = 0.0):
        if not isinstance(target, Schedule) and not (is_number(target) and target >= 0):
            raise ValueError(
                "`target` must be a rate that is not negative, or a "
                "keras.optimizers.schedules.LearningRateSchedule. Received: "
                f"target={target!r}."
            )
        if not is_number(warmup_steps) or warmup_steps < 0 or warmup_steps != int(warmup_steps):
            raise ValueError(
                "`warmup_steps` must be a whole number of steps, 0 or more. Received: "
                f"warmup_steps={warmup_steps!r}."
            )
        if not is_number(start) or start < 0:
            raise ValueError(f"`start` must be a rate, 0 or more. Received: start={start!r}.")
        self.target = target if isinstance(target, Schedule) else float(target)
        self.warmup_steps = int(warmup_steps)
        self.start = float(start)

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of a step, a scalar.

        Args:
            step: The number of steps before this one.
        """
        step = tf.convert_to_tensor(step)
        after = tf.maximum(step - tf.cast(self.warmup_steps, step.dtype), 0)
        rate = tf.convert_to_tensor(self.target(after) if callable(self.target) else self.target)
        if not self.warmup_steps:
            return rate
        risen = tf.cast(step, rate.dtype) / self.warmup_steps
        # `target(0)` until the line has reached it.
        return tf.where(risen < 1, self.start + (rate - self.start) * risen, rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        target = self.target
        if isinstance(target, Schedule):
            target = keras.saving.serialize_keras_object(target)
        return {"target": target, "warmup_steps": self.warmup_steps, "start": self.start}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LinearWarmup":
        """Returns a schedule of that configuration."""
        return cls(**{**config, "target": restored(config["target"])})


def is_number(value: Any) -> bool:
    """Returns whether a value is a Python or NumPy number, no truth value."""
    return not isinstance(value, bool) and isinstance(value, int | float)


def restored(value: Any) -> Any:
    """Returns the schedule that a configuration holds, or the number that it is."""
    return keras.saving.deserialize_keras_object(value) if isinstance(value, dict) else value
