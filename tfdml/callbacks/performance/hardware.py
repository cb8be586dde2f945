"""Memory that this process takes, and the peak speed of its GPUs."""

import re
from pathlib import Path

import keras
import tensorflow as tf

_STATUS = Path("/proc/self/status")
# Dense peak of NVIDIA's data sheets in FLOP/s, by a pattern of the device's name: in bfloat16 or
# float16, and in float32, by TF32 where the GPU has it.
_PEAKS = (
    (r"\bB200\b", 2250e12, 1100e12),
    (r"\bH200\b", 989e12, 494e12),
    (r"\bH100 PCIe\b", 756e12, 378e12),
    (r"\bH100\b", 989e12, 494e12),
    (r"\bA100\b", 312e12, 156e12),
    (r"\bA30\b", 165e12, 82e12),
    (r"\bA10\b", 125e12, 62.5e12),
    (r"\bL40S\b", 362e12, 183e12),
    (r"\bL4\b", 121e12, 60e12),
    (r"\bV100\b", 125e12, 15.7e12),
    (r"\bT4\b", 65e12, 8.1e12),
)


def process_bytes() -> float | None:
    """Returns the bytes of main memory that this process takes now; None if unknown."""
    if not _STATUS.exists():
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", _STATUS.read_text())
    return None if found is None else 1024.0 * int(found[1])


def gpu_peak_bytes() -> float | None:
    """Returns the most bytes that a GPU of this process has held so far; None without a GPU."""
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return None
    peaks = [tf.config.experimental.get_memory_info(_short(gpu.name))["peak"] for gpu in gpus]
    return float(max(peaks))


def peak_flops(model: keras.Model) -> float | None:
    """Returns the peak FLOP/s of this process's first GPU in a model's dtype; None if unknown.

    Args:
        model: The model, whose dtype policy says what it computes in.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "")
    return known_peak_flops(name, model.dtype_policy.compute_dtype)


def known_peak_flops(device: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a GPU; None if it is not in the table.

    Args:
        device: The device's name, such as "NVIDIA A100-SXM4-40GB".
        dtype: The dtype that is computed in.
    """
    for pattern, half, single in _PEAKS:
        if re.search(pattern, device):
            return {"bfloat16": half, "float16": half, "float32": single}.get(dtype)
    return None


def _short(name: str) -> str:
    """Returns a device's name as `get_memory_info` takes it, such as "GPU:0"."""
    return name.removeprefix("/device:")
