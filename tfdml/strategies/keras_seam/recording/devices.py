"""Devices of a `MirroredStrategy` whose steps are recorded: one, or as many as are compared."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.pipeline.device_groups import flat_devices, grouped_like
from tfdml.verification.request import requested


def devices_of_run(devices: Sequence | None) -> Sequence | None:
    """Returns the devices that a run uses: the first ones, or parts of a CPU without GPUs.

    Args:
        devices: The script's devices, or groups of them, each for a replica; None for the default.

    Returns:
        As many devices or groups as a request says; the given ones if there is no request.

    Raises:
        ValueError: If there are too few devices.
    """
    request = requested()
    if request is None:
        return devices
    gpus = [f"GPU:{i}" for i in range(len(tf.config.get_visible_devices("GPU")))]
    known = list(devices or gpus)
    if len(known) >= request.devices:
        return known[: request.devices]
    if any("GPU" in device for device in flat_devices(known)):
        raise ValueError(
            f"`tfdml verify -n {request.devices}` must have a device for each replica. Received: "
            f"{known}. Use fewer replicas, or hide the GPUs with CUDA_VISIBLE_DEVICES=-1 to "
            f"compare on parts of the CPU."
        )
    if devices is None or flat_devices(known) == known:
        return _parts_of_cpu(request.devices)
    groups = [known[0]] * request.devices
    return grouped_like(_parts_of_cpu(len(flat_devices(groups))), groups)


def _parts_of_cpu(count: int) -> list[str]:
    cpu = tf.config.get_visible_devices("CPU")[0]
    if count > len(tf.config.get_logical_device_configuration(cpu) or [cpu]):
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        try:
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError as error:
            raise ValueError(
                f"`MirroredStrategy` must be made before TensorFlow's first operation for `tfdml "
                f"verify`, which divides the CPU into {count} devices. Received: {error}"
            ) from error
    return [f"CPU:{i}" for i in range(count)]
