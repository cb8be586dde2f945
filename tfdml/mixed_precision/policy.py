"""The best Keras dtype policy for a machine."""

from pathlib import Path

import tensorflow as tf

_CPU_INFO = Path("/proc/cpuinfo")
# Compute capabilities from which NVIDIA's GPUs have matrix units for a dtype.
_BFLOAT16_GPU = (8, 0)
_FLOAT16_GPU = (7, 0)


def recommended_policy() -> str:
    """Returns the Keras dtype policy that this machine computes fastest in without losing range.

    bfloat16 is preferred where the hardware supports it: with float32's range it needs no loss
    scaling. All processes of a job must train under one policy: choose it for the weakest machine.

    Returns:
        "mixed_bfloat16", "mixed_float16" (which needs loss scaling, see `LossScaleOptimizer`), or
        "float32" where half precision is not faster.

    Reference:
        NVIDIA, "Train With Mixed Precision", the table of compute capabilities; oneDNN's
        developer guide on bfloat16 for processors.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
        return policy_for_gpus([d.get("compute_capability", (0, 0)) for d in details])
    return policy_for_processor(_CPU_INFO.read_text() if _CPU_INFO.exists() else "")


def policy_for_gpus(capabilities: list[tuple[int, int]]) -> str:
    """Returns the best policy that all GPUs of these compute capabilities support."""
    weakest = min(capabilities)
    if weakest >= _BFLOAT16_GPU:
        return "mixed_bfloat16"
    return "mixed_float16" if weakest >= _FLOAT16_GPU else "float32"


def policy_for_processor(cpu_info: str) -> str:
    """Returns the best policy for a CPU, given the text of `/proc/cpuinfo`."""
    has_bfloat16 = {"amx_bf16", "avx512_bf16"} & set(cpu_info.split())
    return "mixed_bfloat16" if has_bfloat16 else "float32"
