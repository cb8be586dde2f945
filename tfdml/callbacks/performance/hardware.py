"""Memory that this process takes, and the peak speed of its GPUs."""

import re
from pathlib import Path

import keras
import tensorflow as tf

_STATUS = Path("/proc/self/status")
# Peak of GPUs in FLOP/s by a pattern of the device's name, the first that matches, and by dtype: of
# tensor cores, in float32 by TF32 where the GPU has it. From NVIDIA's data sheets of these GPUs,
# which since Ampere print twice as much, too, for sparse matrices.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bB200\b", {"float16": 2250e12, "bfloat16": 2250e12, "float32": 1100e12}),
    (r"\bH[12]00 NVL\b", {"float16": 835.5e12, "bfloat16": 835.5e12, "float32": 417.5e12}),
    (r"\bH100 PCIe\b", {"float16": 756e12, "bfloat16": 756e12, "float32": 378e12}),
    (r"\bH[12]00\b", {"float16": 989e12, "bfloat16": 989e12, "float32": 494e12}),
    (r"\bA100\b", {"float16": 312e12, "bfloat16": 312e12, "float32": 156e12}),
    (r"\bA30\b", {"float16": 165e12, "bfloat16": 165e12, "float32": 82e12}),
    (r"\bA10\b", {"float16": 125e12, "bfloat16": 125e12, "float32": 62.5e12}),
    (r"\bL40S\b", {"float16": 362e12, "bfloat16": 362e12, "float32": 183e12}),
    (r"\bL4\b", {"float16": 121e12, "bfloat16": 121e12, "float32": 60e12}),
    # These have no tensor cores for bfloat16.
    (r"\bV100-PCIE\b", {"float16": 112e12, "float32": 14e12}),
    (r"\bV100-SXM[23]\b", {"float16": 125e12, "float32": 15.7e12}),
    (r"\bT4\b", {"float16": 65e12, "float32": 8.1e12}),
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
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device):
            return peaks.get(dtype)
    return None


def _short(name: str) -> str:
    """Returns a device's name as `get_memory_info` takes it, such as "GPU:0"."""
    return name.removeprefix("/device:")
