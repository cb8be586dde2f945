"""Checks of cores, memory and GPUs; TensorFlow is queried in a child process.

The child runs `python -m tfdml.cli.checks.devices`, which prints as JSON TensorFlow's GPUs, and
whether its operations on processors are those of oneDNN.
"""

import json
import platform

import psutil

from tfdml.cli.checks.finding import Finding, error, ok, warning
from tfdml.horovod_build import child

_SECONDS = 120
_GIB = 1024**3
# A TensorFlow process takes about half of this before it trains anything.
_MEMORY_A_PROCESS = 1 * _GIB


def check_host() -> Finding:
    """Checks cores and memory."""
    cores = psutil.cpu_count() or 1
    memory = psutil.virtual_memory()
    what = f"{cores} cores, {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < 2 * _MEMORY_A_PROCESS:
        return warning(
            "Host", what, "Two TensorFlow processes want 2 GiB: end other programs first."
        )
    return ok("Host", what)


def check_devices() -> Finding:
    """Checks that TensorFlow can be imported, and lists its GPUs.

    Without a GPU, oneDNN's operations should be on. TensorFlow leaves them off on x86 processors
    without AVX-512 VNNI, BF16 or AMX, although they need neither.
    """
    ended = child.ask("tfdml.cli.checks.devices", _SECONDS)
    if not ended.ok or not ended.lines:
        return error(
            "Devices",
            "TensorFlow cannot be imported:\n" + "\n".join(ended.lines[-4:]),
            "Install TensorFlow again: pip install --force-reinstall of the version above.",
        )
    facts = json.loads(ended.lines[-1])
    gpus, has_onednn = facts["gpus"], facts["onednn"]
    what = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"
    if gpus:
        return ok("Devices", f"{what}: {', '.join(gpus)}")
    what += ": training on the CPU"
    if has_onednn or platform.machine() not in ("x86_64", "AMD64"):
        return ok("Devices", what)
    return warning(
        "Devices",
        f"{what}, without oneDNN: dense layers are slow with small batches",
        "Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported, on every rank.",
    )


def _print_facts() -> None:
    import tensorflow as tf
    from tensorflow.python.framework.test_util import IsMklEnabled

    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    print(json.dumps({"gpus": gpus, "onednn": IsMklEnabled()}))


if __name__ == "__main__":
    _print_facts()
