"""Learning rates for large global batches: scaled to the number of replicas, with warm-up."""

from tfdml.schedules.polynomial import polynomial_decay
from tfdml.schedules.scale import Scaled, scale_learning_rate
from tfdml.schedules.warmup import LinearWarmup

__all__ = ["LinearWarmup", "Scaled", "polynomial_decay", "scale_learning_rate"]
