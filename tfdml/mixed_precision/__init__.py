"""Mixed precision: loss scaling that works on all replicas, and the best policy for a machine."""

from tfdml.mixed_precision.loss_scale_optimizer import LossScaleOptimizer
from tfdml.mixed_precision.policy import recommended_policy

__all__ = ["LossScaleOptimizer", "recommended_policy"]
