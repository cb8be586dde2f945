"""The residual network of equal blocks that all candidates train, and its measurement."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

BLOCKS, WIDTH, INNER, ROWS, STEPS = 16, 128, 512, 1024, 3
DROPOUT, RATE = 0.1, 0.01
MIB = 1 << 20


def measured(train: Callable[[], None]) -> dict[str, float]:
    """Trains twice, first to trace and compile, and measures the second time.

    Args:
        train: Trains for `STEPS` steps.

    Returns:
        Seconds a step; seconds of the processors a step, which other work on the machine changes
        less; and MiB of memory at the peak above those between the steps: activations, gradients
        and what an update needs.
    """
    train()
    # Gives what the first training has freed back to the system.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # From now on, a new peak.
    before = _status("VmRSS")
    begin, busy = time.perf_counter(), time.process_time()
    train()
    return {
        "seconds": (time.perf_counter() - begin) / STEPS,
        "processor_seconds": (time.process_time() - busy) / STEPS,
        "mib": (_status("VmHWM") - before) / 1024,
    }


def _status(name: str) -> int:
    """Returns a size of this process in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise KeyError(name)
