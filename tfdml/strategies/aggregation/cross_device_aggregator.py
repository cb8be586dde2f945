"""Gradient sums over the devices of one process by one of TensorFlow's all-reduces."""

import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator, StepGradients
from tfdml.collectives.sparse_gradients import add_up_rows


class CrossDeviceAggregator(GradientAggregator):
    """Aggregator over the devices of one process that uses `tf.distribute.CrossDeviceOps`.

    Args:
        cross_device_ops: The all-reduce, such as `tf.distribute.NcclAllReduce()`.
    """

    per_replica = True

    def __init__(self, cross_device_ops: tf.distribute.CrossDeviceOps):
        self._cross_device_ops = cross_device_ops

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums a replica's gradients with the others'; see `GradientAggregator`."""

        def merge(_, *per_replica):
            pairs = [(value, value) for value in per_replica]
            return self._cross_device_ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)

        replica = tf.distribute.get_replica_context()
        sums = replica.merge_call(merge, args=tuple(gradients.values))
        # In TensorFlow's sums of sparse gradients, a row occurs once per replica that had it.
        return [add_up_rows(s) if isinstance(s, tf.IndexedSlices) else s for s in sums]
