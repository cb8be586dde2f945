"""Scaling of a learning rate with the number of replicas."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfdml.schedules.warmup import Schedule, is_number, restored

_RULES = {"linear": float, "sqrt": math.sqrt, "none": lambda replicas: 1.0}


def scale_learning_rate(
    lr: float | Schedule, replicas: int, rule: str = "linear"
) -> float | Schedule:
    """Returns a learning rate for a global batch that is `replicas` times as large.

    Args:
        lr: Learning rate for one replica's batch: a float, or a schedule.
        replicas: Factor by which the global batch has grown, such as
            `strategy.num_replicas_in_sync`.
        rule: "linear", for SGD (Goyal et al.); "sqrt", for Adam and LAMB (You et al.); "none", if
            the global batch has not changed.

    Returns:
        A float for a float, a schedule for a schedule.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Goyal et al., arXiv:1706.02677, section 2.1; You et al., arXiv:1904.00962, section 4.
    """
    if not is_number(replicas) or replicas < 1 or replicas != int(replicas):
        raise ValueError(
            f"`replicas` must be a positive whole number. Received: replicas={replicas!r}."
        )
    if rule not in _RULES:
        raise ValueError(
            f"`rule` must be one of {', '.join(map(repr, _RULES))}. Received: rule={rule!r}."
        )
    factor = _RULES[rule](replicas)
    if isinstance(lr, Schedule):
        return Scaled(lr, factor)
    if not is_number(lr) or not lr >= 0:
        raise ValueError(
            "`lr` must be a rate that is not negative, or a "
            f"keras.optimizers.schedules.LearningRateSchedule. Received: lr={lr!r}."
        )
    return lr * factor


@keras.saving.register_keras_serializable("tfdml")
class Scaled(Schedule):
    """A schedule times a factor, as returned by `scale_learning_rate` for a schedule.

    Args:
        schedule: The schedule.
        factor: The factor.
    """

    def __init__(self, schedule: Schedule, factor: float):
        self.schedule, self.factor = schedule, float(factor)

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the learning rate of a step, a scalar."""
        return self.schedule(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": self.factor}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Scaled":
        """Creates a schedule from its configuration."""
        return cls(restored(config["schedule"]), config["factor"])
