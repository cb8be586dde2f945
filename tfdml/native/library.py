"""The file of the compiled operations, and its loading."""

import functools
import hashlib
import platform
from pathlib import Path
from types import ModuleType

import tensorflow as tf

_HERE = Path(__file__).resolve().parent
SOURCES = (*sorted(_HERE.glob("*.cc")), *sorted(_HERE.glob("*.h")))
# fma is used only where the source says so, as in XLA's code.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
X86_FLAGS = ("-march=haswell", "-mtune=generic")


def supports_processor() -> bool:
    """Returns whether this CPU can run the operations: x86 with AVX2 and FMA, or 64-bit ARM."""
    machine = platform.machine().lower()
    if machine not in _X86:
        return machine in _ARM
    try:
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return {"avx2", "fma"} <= set(description.split())


def flags() -> list[str]:
    """Returns the compiler's flags, without file names."""
    of_processor = X86_FLAGS if platform.machine().lower() in _X86 else ()
    # `-isystem` silences warnings in TensorFlow's headers.
    includes = [f.replace("-I", "-isystem", 1) for f in tf.sysconfig.get_compile_flags()]
    return [*FLAGS, *of_processor, *includes]


def path() -> Path:
    """Returns the path of the compiled operations, built or not, named by a hash of its inputs."""
    digest = hashlib.sha256(f"{tf.__version__} {platform.machine()} {FLAGS} {X86_FLAGS}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return _HERE / f"operations-{tf.__version__}-{digest.hexdigest()[:12]}.so"


def usable() -> ModuleType | None:
    """Returns the operations; None if they are not available or not useful.

    They run on CPUs: on a machine with a GPU, tensors stay there and XLA compiles the computation.
    """
    if any(device.device_type != "CPU" for device in tf.config.list_logical_devices()):
        return None
    return load()


@functools.cache
def load() -> ModuleType | None:
    """Returns the operations; None if they are not built or this CPU cannot run them.

    Raises:
        tf.errors.NotFoundError: If the file exists and cannot be loaded.
    """
    if not supports_processor() or not path().exists():
        return None
    return tf.load_op_library(str(path()))
