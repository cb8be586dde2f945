"""Optimizers for large global batches and for embedding tables.

`model.compile(tfdml.optimizers.LAMB(0.001), ...)`
"""

from tfdml.optimizers.exclusion import BIASES_AND_SCALES
from tfdml.optimizers.lamb import LAMB
from tfdml.optimizers.lars import LARS
from tfdml.optimizers.lazy_adam import LazyAdam
from tfdml.optimizers.row_wise_adagrad import RowWiseAdagrad

__all__ = ["BIASES_AND_SCALES", "LAMB", "LARS", "LazyAdam", "RowWiseAdagrad"]
