"""Linear warm-up of the learning rate before a schedule."""

from typing import Any

import keras
import tensorflow as tf

Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("tfdml")
class LinearWarmup(Schedule):
    """Schedule that rises linearly from `start` to the start of `target`, then follows it.

    The target's step 0 is at step `warmup_steps`: none of it is skipped, and a decay ends
    `warmup_steps` later. Warm-ups can be nested, and wrap any schedule of Keras or tfdml.

    Args:
        target: The learning rate to reach: a float, or a schedule.
        warmup_steps: Steps until it is reached; 0 for no warm-up.
        start: Learning rate of the first step.

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
        """Returns the learning rate of a step, a scalar.

        Args:
            step: The number of steps before this one.
        """
        step = tf.convert_to_tensor(step)
        after = tf.maximum(step - tf.cast(self.warmup_steps, step.dtype), 0)
        rate = tf.convert_to_tensor(self.target(after) if callable(self.target) else self.target)
        if not self.warmup_steps:
            return rate
        risen = tf.cast(step, rate.dtype) / self.warmup_steps
        # During the warm-up `after` is 0, so `rate` is `target(0)`.
        return tf.where(risen < 1, self.start + (rate - self.start) * risen, rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        target = self.target
        if isinstance(target, Schedule):
            target = keras.saving.serialize_keras_object(target)
        return {"target": target, "warmup_steps": self.warmup_steps, "start": self.start}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LinearWarmup":
        """Creates a schedule from its configuration."""
        return cls(**{**config, "target": restored(config["target"])})


def is_number(value: Any) -> bool:
    """Returns whether a value is a Python int or float, or a subclass of them, but not a bool."""
    return not isinstance(value, bool) and isinstance(value, int | float)


def restored(value: Any) -> Any:
    """Returns the schedule of a configuration; a number is returned as it is."""
    return keras.saving.deserialize_keras_object(value) if isinstance(value, dict) else value
