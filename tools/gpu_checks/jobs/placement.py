"""Devices of a job's process: GPUs, or logical devices instead."""

import json
import os

# Memory of each logical GPU, if one card is split into several devices.
LOGICAL_MEGABYTES = 4096


def local_rank() -> int:
    """Returns the local rank of this process."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return int(config.get("task", {}).get("index", os.environ.get("HOROVOD_LOCAL_RANK", 0)))


def prepare(kind: str) -> None:
    """Hides the GPUs for a report on CPUs; must be called before TensorFlow is imported.

    Args:
        kind: "cpu" or "gpu".
    """
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def one_card(kind: str, cards: int) -> None:
    """Shows this process only its rank's card; must be called before TensorFlow is imported.

    Args:
        kind: "cpu" or "gpu".
        cards: Number of cards that the ranks use; with one, all ranks share it.
    """
    prepare(kind)
    if kind == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(cards)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank() % cards]


def devices(kind: str, count: int, split: bool = False) -> list[str]:
    """Sets up this process's devices; returns their names.

    Args:
        kind: "cpu" or "gpu".
        count: Number of devices.
        split: Whether to use logical devices of one card, as is done if there are too few cards.
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
    """Disables TF32, with which GPUs by default round float32 mantissas to 10 bits."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
