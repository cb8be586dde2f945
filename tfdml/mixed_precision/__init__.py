"""Half precision: loss scaling that is right on every replica, and a policy for the machine."""

from tfdml.mixed_precision.loss_scale_optimizer import LossScaleOptimizer
from tfdml.mixed_precision.policy import recommended_policy

__all__ = ["LossScaleOptimizer", "recommended_policy"]
