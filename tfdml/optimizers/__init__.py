"""Optimizers for large global batches: `model.compile(tfdml.optimizers.LAMB(0.001), ...)`."""

from tfdml.optimizers.exclusion import BIASES_AND_SCALES
from tfdml.optimizers.lamb import LAMB
from tfdml.optimizers.lars import LARS

__all__ = ["BIASES_AND_SCALES", "LAMB", "LARS"]
