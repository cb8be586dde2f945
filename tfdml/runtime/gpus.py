"""Assigns GPUs to this process: TensorFlow sees only these, and grows their memory on demand.

Both can be set only before TensorFlow first uses its devices. After that, and where the program
has made its own choice, nothing is changed.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdml.runtime.servers.server_task import WORKER
from tfdml.topology import Topology


def own_devices(
    named: Sequence[str] | None, process: Topology, most: int | None = None
) -> list[str]:
    """Makes only this process's GPUs visible to TensorFlow; returns the names of its devices.

    Args:
        named: Devices that the user has named. They keep their numbers: all GPUs up to the last
            one named are visible.
        process: Topology of this process. The processes of a host share its GPUs if none is named.
        most: Maximum number of GPUs of this process if none is named.

    Returns:
        `named`, or else this process's GPUs, or its first CPU where there are none.

    Raises:
        ValueError: If the host has fewer GPUs than processes, or if named GPUs are not visible
            because of an earlier choice in this process.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return list(named or ["CPU:0"])
    if _are_chosen(gpus):
        _check_visible(named, gpus)
        _let_grow(gpus)
        return list(named or _names(_num_logical(gpus))[:most])
    own = _up_to_last(named) if named else assigned_gpus(len(gpus), process)[:most]
    try:
        tf.config.set_visible_devices([gpus[i] for i in own if i < len(gpus)], "GPU")
    except RuntimeError:  # TensorFlow uses its devices already.
        return list(named or [f"GPU:{i}" for i in own])
    _let_grow(tf.config.get_visible_devices("GPU"))
    return list(named or _names(len(own)))


def hide_all() -> None:
    """Hides all GPUs from TensorFlow, so that this process takes none of their memory.

    For the chief of a parameter server cluster, which only reads data and dispatches steps.
    """
    with contextlib.suppress(RuntimeError):  # TensorFlow uses its devices already.
        tf.config.set_visible_devices([], "GPU")


def server_config(role: str, process: Topology, num_gpus: int) -> tf.compat.v1.ConfigProto:
    """Returns the GPU configuration of a TensorFlow server in a parameter server cluster.

    These servers ignore `tf.config`.

    Args:
        role: Role of the server. A worker has one replica and so one GPU; others have none.
        process: Topology of this process among the workers of its host.
        num_gpus: Number of GPUs that the process sees.
    """
    own = assigned_gpus(num_gpus, process)[:1] if role == WORKER else []
    if not own:
        return tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    options = tf.compat.v1.GPUOptions(allow_growth=True, visible_device_list=f"{own[0]}")
    return tf.compat.v1.ConfigProto(gpu_options=options)


def assigned_gpus(num_gpus: int, process: Topology) -> list[int]:
    """Returns the numbers of a process's GPUs: an equal share for each process of its host.

    A process that sees one GPU owns it: the launcher or scheduler has given each its own.

    Args:
        num_gpus: Number of GPUs that the process sees.
        process: Topology of the process.

    Raises:
        ValueError: If the process sees several GPUs, but fewer than its host has processes.
    """
    if num_gpus <= 1:
        return list(range(num_gpus))
    each = num_gpus // process.local_size
    if not each:
        raise ValueError(
            f"A host must have a GPU for each of its processes. Received on rank {process.rank}: "
            f"{num_gpus} GPUs for {process.local_size} processes. Start {num_gpus} processes on "
            f"this host, or pass `devices`."
        )
    return list(range(process.local_rank * each, (process.local_rank + 1) * each))


def _are_chosen(gpus: list) -> bool:
    """Returns whether the program or an earlier strategy has already selected or split GPUs."""
    return _num_logical(gpus) > len(gpus) or len(gpus) < _num_physical()


def _let_grow(gpus: list) -> None:
    for gpu in gpus:
        # A GPU split into logical devices has parts of a fixed size.
        if not tf.config.get_logical_device_configuration(gpu):
            with contextlib.suppress(RuntimeError):  # TensorFlow uses its devices already.
                tf.config.experimental.set_memory_growth(gpu, True)


def _check_visible(named: Sequence[str] | None, gpus: list) -> None:
    if named and _num_logical(gpus) < len(_up_to_last(named)) <= _num_physical():
        raise ValueError(
            f"`devices` must be visible to TensorFlow. Received: devices={list(named)!r}, where "
            f"{len(gpus)} of {_num_physical()} GPUs are visible, as an earlier strategy of "
            f"this process or `tf.config.set_visible_devices` has set. Name all GPUs of the "
            f"process in its first strategy."
        )


def _up_to_last(named: Sequence[str]) -> list[int]:
    """Returns the numbers of all GPUs up to the last one named."""
    specs = [tf.DeviceSpec.from_string(device) for device in named]
    last = max((s.device_index or 0 for s in specs if s.device_type == "GPU"), default=-1)
    return list(range(last + 1))


def _num_physical() -> int:
    return len(tf.config.list_physical_devices("GPU"))


def _num_logical(gpus: list) -> int:
    """Returns the number of logical devices that TensorFlow will make of the GPUs."""
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [gpu]) for gpu in gpus)


def _names(count: int) -> list[str]:
    return [f"GPU:{i}" for i in range(count)]
