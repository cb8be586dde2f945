"""Which devices a job's process uses: GPUs, or logical devices in their place."""

import json
import os

# Of each logical GPU, where one card is to be several devices.
LOGICAL_MEGABYTES = 4096


def local_rank() -> int:
    """Returns this process's place among those of its job."""
    told = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return int(told.get("task", {}).get("index", os.environ.get("HOROVOD_LOCAL_RANK", 0)))


def prepare(kind: str) -> None:
    """Hides the GPUs where the report is of processors; must come before TensorFlow.

    Args:
        kind: "cpu" or "gpu".
    """
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def one_card(kind: str, cards: int) -> None:
    """Shows this process one card alone, that of its rank; must come before TensorFlow.

    Args:
        kind: "cpu" or "gpu".
        cards: The number of cards that the ranks use; with one, all of them share it.
    """
    prepare(kind)
    if kind == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(cards)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank() % cards]


def devices(kind: str, count: int, split: bool = False) -> list[str]:
    """Makes this process's devices; returns their names.

    Args:
        kind: "cpu" or "gpu".
        count: How many.
        split: Whether they are to be logical devices of one card; also where there are too few.
    """
    import tensorflow as tf

    exact_products()
    physical = tf.config.list_physical_devices(kind.upper())
    if split or len(physical) < count:
        limit = LOGICAL_MEGABYTES if kind == "gpu" else None
        logical = [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for _ in range(count)]
        tf.config.set_visible_devices(physical[0], kind.upper())
        tf.config.set_logical_device_configuration(physical[0], logical)
    return [f"{kind.upper()}:{i}" for i in range(count)]


def exact_products() -> None:
    """Makes GPUs multiply float32 numbers as such: by default they round them to 10 bits."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
