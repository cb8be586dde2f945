"""`MirroredStrategy`: `model.fit` on several GPUs of one machine, in one process."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import LocalCollective
from tfdml.compression import Auto, Compressor
from tfdml.strategies import arguments
from tfdml.strategies.replica_strategy import ReplicaStrategy


class MirroredStrategy(ReplicaStrategy):
    """Synchronous training on several devices of this machine, in a strategy scope.

    Takes the place of `tf.distribute.MirroredStrategy`, which with Keras 3 weighs uneven batches
    wrongly, clips gradients before their sum, and lets a replica's float16 overflow into the
    weights. Losses, metrics and weights are those of one device. Needs no Horovod.

    Args:
        devices: The devices, such as `["GPU:0", "GPU:1"]`; all GPUs by default, or a CPU where
            there are none.
        compression: How gradients are compressed between the devices: one of `tfdml.compression`,
            such as `PowerSGD(rank=4)`, or its name. Each device is then what a process is
            elsewhere, so this shows on one machine what a codec does to a training. "auto" sends
            them as they are: there is no network between devices.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self, devices: Sequence[str] | None = None, compression: Compressor | str | None = None
    ):
        options = arguments.check(devices, compression)
        super().__init__(LocalCollective(), devices or all_devices(), options)
        if not isinstance(options.compression, Auto):
            self.extended.compress_between_devices()


def all_devices() -> list[str]:
    """Returns this process's GPUs, or its first CPU where there are none."""
    gpus = tf.config.list_logical_devices("GPU")
    return [f"GPU:{i}" for i in range(len(gpus))] or ["CPU:0"]
