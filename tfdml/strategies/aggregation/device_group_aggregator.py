"""Aggregator that sums uncompressed gradients over all devices of all processes at once."""

from collections.abc import Callable

import tensorflow as tf

from tfdml.collectives.aggregator import (
    Gradient,
    GradientAggregator,
    StepGradients,
    dense_buckets,
    sum_in_buckets,
)
from tfdml.collectives.buckets import spread
from tfdml.collectives.collective import Collective


class DeviceGroupAggregator(GradientAggregator):
    """Aggregator that all-reduces gradients between devices, not between processes.

    Sparse gradients are first summed on one of the process's devices, then gathered from there.

    Args:
        exchange: Function of an exchange's name and of each of this process's devices' tensors
            that returns their sums over the devices of all processes, for each device.
        collective: Collective that gathers sparse gradients.
        bucket_bytes: Size of a gradient bucket in bytes.
    """

    per_replica = True

    def __init__(
        self,
        exchange: Callable[[str, list[list[tf.Tensor]]], list[list[tf.Tensor]]],
        collective: Collective,
        bucket_bytes: int,
    ):
        self._exchange = exchange
        self._collective = collective
        self._bucket_bytes = bucket_bytes

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums a replica's gradients with the others'; see `GradientAggregator`."""

        def merge(strategy, *per_replica):
            extended = strategy.extended
            parts = [extended.parts_of(value) for value in per_replica]
            sums = [None] * len(parts)
            buckets = dense_buckets([own[0] for own in parts], self._bucket_bytes)
            for number, bucket in enumerate(buckets):
                own = [[parts[i][d] for i in bucket.indices] for d in range(len(parts[0]))]
                name = f"{gradients.label}/bucket_{number}"
                totals = zip(*self._exchange(name, own), strict=True)
                for i, total in zip(bucket.indices, totals, strict=True):
                    sums[i] = extended.replica_values(total)
            sparse = [i for i, own in enumerate(parts) if isinstance(own[0], tf.IndexedSlices)]
            devices = spread([], len(sparse), extended.local_devices)
            rows = [
                extended.local_sum(per_replica[i], device)
                for i, device in zip(sparse, devices, strict=True)
            ]
            totals = sum_in_buckets(self._collective, rows, gradients.label, devices=devices)
            for i, total in zip(sparse, totals, strict=True):
                sums[i] = extended.on_all_devices(total)
            return sums

        replica = tf.distribute.get_replica_context()
        return list(replica.merge_call(merge, args=tuple(gradients.values)))
