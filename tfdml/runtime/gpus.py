"""GPUs of this process: TensorFlow sees these alone, and takes their memory as it needs it.

Both can be chosen only until TensorFlow first uses its devices. Afterwards, and where the program
has chosen for itself, all is left as it is.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdml.runtime.server_task import WORKER
from tfdml.topology import Topology


def own_devices(named: Sequence[str] | None, place: Topology, most: int | None = None) -> list[str]:
    """Shows TensorFlow this process's GPUs alone; returns the names of its devices.

    Args:
        named: Devices that the user has named. Their numbers stay: the GPUs from the first to the
            last one named are visible.
        place: This process among those of its host, which share its GPUs where none is named.
        most: The most GPUs of a process for which none is named.

    Returns:
        `named`, or else this process's GPUs, or its first CPU where there are none.

    Raises:
        ValueError: If the host has fewer GPUs than processes, or GPUs are named that this process
            has left to others.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return list(named or ["CPU:0"])
    if _are_chosen(gpus):
        _check_visible(named, gpus)
        _let_grow(gpus)
        return list(named or _names(_num_logical(gpus))[:most])
    own = _up_to_last(named) if named else share_of(len(gpus), place)[:most]
    try:
        tf.config.set_visible_devices([gpus[i] for i in own if i < len(gpus)], "GPU")
    except RuntimeError:  # TensorFlow uses its devices already.
        return list(named or [f"GPU:{i}" for i in own])
    _let_grow(tf.config.get_visible_devices("GPU"))
    return list(named or _names(len(own)))


def hide_all() -> None:
    """Shows TensorFlow no GPU, where a process has no use for one: none of their memory is taken.

    The chief of parameter servers reads data and sends work.
    """
    with contextlib.suppress(RuntimeError):  # TensorFlow uses its devices already.
        tf.config.set_visible_devices([], "GPU")


def server_config(role: str, place: Topology, num_gpus: int) -> tf.compat.v1.ConfigProto:
    """Returns what TensorFlow's server of a parameter server cluster is told of GPUs.

    `tf.config` does not count for these servers.

    Args:
        role: What it serves as. A worker has one replica, so it has one GPU; others have none.
        place: This process among the workers of its host.
        num_gpus: How many GPUs the process sees.
    """
    own = share_of(num_gpus, place)[:1] if role == WORKER else []
    if not own:
        return tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    options = tf.compat.v1.GPUOptions(allow_growth=True, visible_device_list=f"{own[0]}")
    return tf.compat.v1.ConfigProto(gpu_options=options)


def share_of(num_gpus: int, place: Topology) -> list[int]:
    """Returns the numbers of a process's GPUs: equally many for each process of its host.

    A process that sees one GPU has it for itself: the launcher or scheduler shows each its own.

    Args:
        num_gpus: How many GPUs the process sees.
        place: The process among those of its host.

    Raises:
        ValueError: If there are fewer GPUs than processes.
    """
    if num_gpus <= 1:
        return list(range(num_gpus))
    each = num_gpus // place.local_size
    if not each:
        raise ValueError(
            f"A host must have a GPU for each of its processes. Received on rank {place.rank}: "
            f"{num_gpus} GPUs for {place.local_size} processes. Start {num_gpus} processes on this "
            f"host, or pass `devices`."
        )
    return list(range(place.local_rank * each, (place.local_rank + 1) * each))


def _are_chosen(gpus: list) -> bool:
    """Returns whether the program, or a strategy before, has chosen among the GPUs."""
    return _num_logical(gpus) > len(gpus) or len(gpus) < _num_physical()


def _let_grow(gpus: list) -> None:
    for gpu in gpus:
        # What is split has parts of a fixed size.
        if not tf.config.get_logical_device_configuration(gpu):
            with contextlib.suppress(RuntimeError):  # TensorFlow uses its devices already.
                tf.config.experimental.set_memory_growth(gpu, True)


def _check_visible(named: Sequence[str] | None, gpus: list) -> None:
    if named and _num_logical(gpus) < len(_up_to_last(named)) <= _num_physical():
        raise ValueError(
            f"`devices` must be visible to TensorFlow. Received: devices={list(named)!r}, where "
            f"{len(gpus)} of {_num_physical()} GPUs are visible, as an earlier strategy of this "
            f"process or `tf.config.set_visible_devices` has it. Name all GPUs of the process in "
            f"its first strategy."
        )


def _up_to_last(named: Sequence[str]) -> list[int]:
    """Returns the numbers of the GPUs up to the last one named."""
    specs = [tf.DeviceSpec.from_string(device) for device in named]
    last = max((s.device_index or 0 for s in specs if s.device_type == "GPU"), default=-1)
    return list(range(last + 1))


def _num_physical() -> int:
    return len(tf.config.list_physical_devices("GPU"))


def _num_logical(gpus: list) -> int:
    """Returns how many devices GPUs are once TensorFlow uses them."""
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [gpu]) for gpu in gpus)


def _names(count: int) -> list[str]:
    return [f"GPU:{i}" for i in range(count)]
