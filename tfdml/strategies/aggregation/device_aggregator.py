"""Gradient sums over the devices of one process, each device acting as a rank.

Each replica traces in its own thread. `merge_call` brings the replicas together, and there the
transfers between devices are traced.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator, StepGradients
from tfdml.collectives.collective import Collective
from tfdml.topology import Topology


class DeviceCollective(Collective):
    """Collective between the devices of a process; all replicas call it, in replica context.

    Args:
        devices: The devices, one per replica.
        rank: Index of this device in `devices`.
    """

    branches = False
    crosses_processes = False

    def __init__(self, devices: Sequence[str], rank: int):
        size = len(devices)
        super().__init__(Topology(rank, size, rank, size, "devices"))
        self._devices = devices

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all devices; each device sums one part. See `Collective`."""
        flat = [tf.reshape(t, [-1]) for t in tensors]
        sizes = [tf.size(t) for t in flat]

        def sums(packed: list[tf.Tensor]) -> list[list[tf.Tensor]]:
            length = tf.shape(packed[0])[0]
            bounds = [length * i // self.size for i in range(self.size + 1)]
            cut = self._on_each_device(
                lambda rank: [packed[rank][a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
            )
            added = self._on_each_device(lambda rank: [tf.add_n([own[rank] for own in cut])])
            return self._on_each_device(lambda _: [tf.concat([part for (part,) in added], 0)])

        (total,) = self._meet([tf.concat(flat, 0)], sums)
        return [
            tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape)
            for part, t in zip(tf.split(total, sizes, num=len(flat)), tensors, strict=True)
        ]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the devices' tensors; see `Collective`."""
        (whole,) = self._meet(
            [tensor], lambda parts: self._on_each_device(lambda _: [tf.concat(parts, 0)])
        )
        return whole

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to device i; see `Collective`."""

        def rows(parts: list[tf.Tensor]) -> list[list[tf.Tensor]]:
            # Split on the source device, so that only the needed rows are copied.
            cut = self._on_each_device(lambda rank: tf.unstack(parts[rank]))
            return self._on_each_device(lambda rank: [tf.stack([own[rank] for own in cut])])

        return self._meet([tensor], rows)[0]

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every device the tensor of `root`; see `Collective`."""
        return self._meet([tensor], lambda parts: [[parts[root]]] * self.size)[0]

    def _on_each_device(self, make: Callable[[int], list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        made = []
        for rank, device in enumerate(self._devices):
            with tf.device(device):
                made.append(make(rank))
        return made

    def _meet(self, tensors: Sequence[tf.Tensor], exchange: Callable) -> list[tf.Tensor]:
        """Exchanges tensors between all devices; returns this device's result.

        Args:
            tensors: This device's tensors.
            exchange: Function of each tensor's parts, in the order of the devices, that returns a
                list of result tensors for each device.
        """

        def merge(strategy: tf.distribute.Strategy, *values):
            gathered = [strategy.extended.parts_of(v) for v in values]
            copies = []
            for device, own in zip(self._devices, exchange(*gathered), strict=True):
                with tf.device(device):
                    copies.append([tf.identity(t) for t in own])
            return strategy.extended.replica_values(copies)

        return list(tf.distribute.get_replica_context().merge_call(merge, args=tuple(tensors)))


class DeviceAggregator(GradientAggregator):
    """Aggregator over the devices of one process, each acting as a rank.

    Args:
        devices: The devices, one per replica.
        make: Function that returns a rank's aggregator, from its collective.
    """

    per_replica = True

    def __init__(self, devices: Sequence[str], make: Callable[[Collective], GradientAggregator]):
        self._parts = [make(DeviceCollective(devices, rank)) for rank in range(len(devices))]
        self.needs_weight = self._parts[0].needs_weight

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Sums a replica's gradients with the others'; see `GradientAggregator`."""
        part = self._parts[tf.distribute.get_replica_context()._local_replica_id]
        return part.aggregate(gradients)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """Variables that persist between steps, by device and name."""
        return {
            f"device_{rank}/{name}": variable
            for rank, part in enumerate(self._parts)
            for name, variable in part.state.items()
        }

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state of an earlier job; see `GradientAggregator`."""
        for part in self._parts:
            part.restore(before)
