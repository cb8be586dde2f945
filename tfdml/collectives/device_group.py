"""All-reduce among all devices of all processes, each with gradients of its own."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.tensorflow import GroupMember, named_group
from tfdml.topology import Topology


class DeviceGroup:
    """Group of all devices of all processes, summed by TensorFlow's ring or NCCL.

    Args:
        topology: This process's rank and the size of the job; all processes have the same number
            of devices.
        devices: This process's devices, with job and task if there are several processes.
        options: Communication options: the implementation, and a time limit in seconds.
    """

    def __init__(
        self,
        topology: Topology,
        devices: Sequence[str],
        options: tf.distribute.experimental.CommunicationOptions,
    ):
        size = topology.size * len(devices)
        # Different devices form a different group, which TensorFlow identifies by its key.
        own = ",".join(device.rpartition("/device:")[2] for device in devices)
        key = named_group(own)
        self._members = {device: GroupMember(device, key, size, options) for device in devices}
        self._graphs: dict[str, Callable] = {}

    def all_reduce(self, parts: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        """Sums each tensor over all devices, as one exchange.

        Args:
            parts: For each device of this process its tensors, of one dtype and any shapes, the
                same on all devices of all processes.
            name: The exchange's name.

        Returns:
            The sums for each device, bitwise identical everywhere.
        """
        if not tf.executing_eagerly():
            return self._summed(parts, name)
        # Executed eagerly one after the other, the first device would wait for the second forever.
        if name not in self._graphs:
            self._graphs[name] = tf.function(lambda parts: self._summed(parts, name))
        return self._graphs[name](parts)

    def _summed(self, parts: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        sums = []
        for (device, member), own in zip(self._members.items(), parts, strict=True):
            with tf.device(device):
                sums.append(member.all_reduce(own, name))
        return sums


def device_group(
    topology: Topology,
    devices: Sequence[str],
    options: tf.distribute.experimental.CommunicationOptions,
) -> DeviceGroup | None:
    """Returns the group that sums uncompressed gradients, None if no group is faster.

    CPU devices share memory: one device's sum is read by the process's others without a copy, which
    no ring can beat. CPUs get a group only if `options` request an implementation.

    Args:
        topology: This process's rank and the size of the job.
        devices: This process's devices.
        options: Communication options.
    """
    implementations = tf.distribute.experimental.CommunicationImplementation
    chosen = options.implementation
    if len(devices) == 1:
        return None
    if chosen == implementations.AUTO:
        if not all("GPU" in device for device in devices):
            return None
        cards, gpus = tf.config.list_physical_devices("GPU"), tf.config.list_logical_devices("GPU")
        # NCCL refuses two members on one physical GPU.
        chosen = implementations.NCCL if len(gpus) <= len(cards) else implementations.RING
    return DeviceGroup(
        topology,
        devices,
        tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=options.timeout_seconds, implementation=chosen
        ),
    )
