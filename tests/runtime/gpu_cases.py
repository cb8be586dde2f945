"""Cases run in processes whose TensorFlow is configured to list GPUs that do not exist.

A GPU is an entry in TensorFlow's list of physical devices here. The cases read the settings with
which TensorFlow would start.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

import tfdml
from tfdml.runtime.gpus import hide_all, own_devices
from tfdml.topology import Topology


@contextlib.contextmanager
def machine(gpus: int) -> Iterator[None]:
    """Simulates a TensorFlow that has not started and has this many GPUs."""
    context._reset_context()
    tf.config.list_physical_devices()
    fresh = context.context()
    for i in range(gpus):
        gpu = context.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")
        fresh._physical_devices.append(gpu)
        fresh._visible_device_list.append(gpu)
        fresh._physical_device_to_index[gpu] = i
        fresh._memory_growth_map[gpu] = None
    yield
    context._reset_context()


def settings() -> tuple[str, bool]:
    """Returns the GPUs visible to TensorFlow, and whether their memory grows."""
    visible = tf.config.get_visible_devices("GPU")
    growing = {tf.config.experimental.get_memory_growth(gpu) for gpu in visible}
    return ",".join(gpu.name[-1] for gpu in visible), growing == {True}


def taken(gpus: int, named: list[str] | None, local: tuple, most: int | None = None) -> Any:
    """Returns the devices of a process and the settings; the error if it is refused."""
    with machine(gpus):
        try:
            devices = own_devices(named, Topology(*local, *local), most)
        except ValueError as error:
            return str(error)
        return devices, *settings()


def taken_twice(first: list[str] | None, second: list[str] | None) -> Any:
    """Returns the GPUs, out of four, that a second strategy of a process takes."""
    with machine(4):
        own_devices(first, Topology(1, 2, 1, 2))
        try:
            return own_devices(second, Topology(1, 2, 1, 2)), *settings()
        except ValueError as error:
            return str(error)


def taken_after(choice: str) -> tuple:
    """Returns the GPUs that a process takes if the program has chosen some before."""
    with machine(4):
        gpus = tf.config.list_physical_devices("GPU")
        if choice == "visible":
            tf.config.set_visible_devices(gpus[2:], "GPU")
        elif choice == "split":
            halves = [tf.config.LogicalDeviceConfiguration(memory_limit=100)] * 2
            tf.config.set_logical_device_configuration(gpus[0], halves)
        return own_devices(None, Topology(0, 2, 0, 2)), *settings()


def taken_too_late() -> tuple:
    """Returns the GPUs of a process whose TensorFlow has started, on the real machine."""
    with machine(0):
        tf.constant(1) + 1
        context.context()._physical_devices += [
            gpu := context.PhysicalDevice("/physical_device:GPU:0", "GPU"),
            other := context.PhysicalDevice("/physical_device:GPU:1", "GPU"),
        ]
        context.context()._visible_device_list += [gpu, other]
        hide_all()
        return own_devices(None, Topology(1, 2, 1, 2))


def taken_by(make: str) -> tuple:
    """Returns the settings that a strategy leaves on a machine with two GPUs.

    Its constructor may fail when it tries to use them.
    """
    makers: dict[str, Callable] = {
        "horovod": tfdml.HorovodStrategy,
        "mirrored": tfdml.MirroredStrategy,
        "multi_worker": lambda: tfdml.MultiWorkerMirroredStrategy(start_limit=0.1),
        "chief": lambda: tfdml.ParameterServerStrategy(start_limit=0.1),
    }
    with machine(2):
        with contextlib.suppress(Exception):
            makers[make]()
        return settings()


def logical_cpus() -> tuple:
    """Two logical CPUs are two replicas, without a GPU."""
    with machine(0):
        (cpu,) = tf.config.list_physical_devices("CPU")
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)
        two = tfdml.MirroredStrategy(["CPU:0", "CPU:1"])

        def count() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1))

        counts = two.experimental_local_results(two.run(count))
        return [int(c) for c in counts], tfdml.MirroredStrategy().num_replicas_in_sync
