"""All devices of all processes as one group, each with gradients of its own."""

import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.tensorflow import Member
from tfdml.topology import Topology

# Groups are numbered by int32; `tensorflow` has lower numbers.
_FIRST_GROUP = 1 << 20
_GROUPS = 2**31 - _FIRST_GROUP


class DeviceGroup:
    """Sums what devices have, by TensorFlow's own ring or NCCL, on every device at once.

    Args:
        topology: This process's place in the job; all have as many devices.
        devices: This process's devices, with job and task where there are several processes.
        options: How to communicate: the implementation, and a time limit in seconds.
    """

    def __init__(
        self,
        topology: Topology,
        devices: Sequence[str],
        options: tf.distribute.experimental.CommunicationOptions,
    ):
        size = topology.size * len(devices)
        # Other devices are another group, which TensorFlow knows by its number.
        own = ",".join(device.rpartition("/device:")[2] for device in devices)
        key = _FIRST_GROUP + zlib.crc32(own.encode()) % _GROUPS
        self._members = {device: Member(device, key, size, options) for device in devices}
        self._graphs: dict[str, Callable] = {}

    def all_reduce(self, parts: Sequence[Sequence[tf.Tensor]], name: str) -> list[list[tf.Tensor]]:
        """Sums each tensor over all devices, as one exchange.

        Args:
            parts: For each device of this process its tensors, of one dtype and any shapes, alike
                on all devices of all processes.
            name: The exchange's name.

        Returns:
            For each device the sums: the same bits everywhere.
        """
        if not tf.executing_eagerly():
            return self._summed(parts, name)
        # Executed one after the other, the first device would wait for the second forever.
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
    """Returns the group that sums uncompressed gradients, None where none is faster.

    Processors share their memory: what one of a process's devices has added up, the others read
    without a copy, which no ring can beat. There is a group between them only if `options` ask for
    an implementation.

    Args:
        topology: This process's place in the job.
        devices: This process's devices.
        options: How to communicate.
    """
    implementations = tf.distribute.experimental.CommunicationImplementation
    chosen = options.implementation
    if len(devices) == 1:
        return None
    if chosen == implementations.AUTO:
        if not all("GPU" in device for device in devices):
            return None
        cards, gpus = tf.config.list_physical_devices("GPU"), tf.config.list_logical_devices("GPU")
        # NCCL refuses two members on one card.
        chosen = implementations.NCCL if len(gpus) <= len(cards) else implementations.RING
    return DeviceGroup(
        topology,
        devices,
        tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=options.timeout_seconds, implementation=chosen
        ),
    )
