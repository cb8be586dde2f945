"""Where the compiled operations are kept, and loading them."""

import functools
import hashlib
import platform
from pathlib import Path
from types import ModuleType

import tensorflow as tf

_HERE = Path(__file__).resolve().parent
SOURCES = (*sorted(_HERE.glob("*.cc")), *sorted(_HERE.glob("*.h")))
# Products are added by fma where the source says so and nowhere else, as in XLA's code.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
X86_FLAGS = ("-march=haswell", "-mtune=generic")


def supports_processor() -> bool:
    """Returns whether the operations run here: on x86 with AVX2 and FMA, and on 64-bit ARM."""
    machine = platform.machine().lower()
    if machine not in _X86:
        return machine in _ARM
    try:
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return {"avx2", "fma"} <= set(description.split())


def flags() -> list[str]:
    """Returns the compiler's flags, but for the files."""
    of_processor = X86_FLAGS if platform.machine().lower() in _X86 else ()
    # What comes with TensorFlow is not ours to warn of.
    includes = [f.replace("-I", "-isystem", 1) for f in tf.sysconfig.get_compile_flags()]
    return [*FLAGS, *of_processor, *includes]


def path() -> Path:
    """Returns the file of the operations, built or not: named after all that they follow from."""
    digest = hashlib.sha256(f"{tf.__version__} {platform.machine()} {FLAGS} {X86_FLAGS}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return _HERE / f"operations-{tf.__version__}-{digest.hexdigest()[:12]}.so"


def usable() -> ModuleType | None:
    """Returns the operations, None where they are not there or do not do.

    They are for processors: with a GPU, numbers stay there and XLA compiles what is done to them.
    """
    if any(device.device_type != "CPU" for device in tf.config.list_logical_devices()):
        return None
    return load()


@functools.cache
def load() -> ModuleType | None:
    """Returns the operations, None where they are not built or do not run.

    Raises:
        tf.errors.NotFoundError: If the file is there and cannot be loaded.
    """
    if not supports_processor() or not path().exists():
        return None
    return tf.load_op_library(str(path()))
