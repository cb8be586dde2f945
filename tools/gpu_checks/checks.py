"""List of the report's checks, and a function that runs one."""

import dataclasses
import subprocess
from collections.abc import Callable, Iterator

from tools.gpu_checks import basics, training
from tools.gpu_checks.codecs import codecs
from tools.gpu_checks.compressed import compressed
from tools.gpu_checks.machine import Machine
from tools.gpu_checks.prefetch import prefetch
from tools.gpu_checks.row import Row
from tools.gpu_checks.speed import memory, scaling

# Last characters shown of a job's output.
SHOWN = 400


@dataclasses.dataclass(frozen=True)
class Check:
    """Check that yields one or more rows of the report.

    Attributes:
        name: Name for `--only`.
        rows: Callable that runs the check; its processes have time limits.
        about: Description of the check.
    """

    name: str
    rows: Callable[[Machine], Iterator[Row]]
    about: str


CHECKS = (
    Check("versions", basics.versions, "Python, TensorFlow, Keras, Horovod, CUDA, the driver"),
    Check("devices", basics.devices, "each device multiplies matrices as NumPy does"),
    Check("mirrored", training.two_logical, "two logical devices of one card train as one device"),
    Check("horovod", training.two_ranks, "two gloo ranks on one card train as one device"),
    Check("multi_worker", training.two_workers, "two workers on one card train as one device"),
    Check("codecs", codecs, "each codec's GB/s, and that no gradient is copied to the host"),
    Check("compressed", compressed, "two ranks on one card train with each codec"),
    Check("prefetch", prefetch, "batches are on the devices before a step asks for them"),
    Check("memory", memory, "peak memory of the three strategies beside stock"),
    Check("nccl", training.nccl, "each strategy over NCCL trains as one device"),
    Check("scaling", scaling, "images a second on all devices, ours and stock, equal weights"),
)


def rows_of(check: Check, machine: Machine) -> list[Row]:
    """Runs a check; an error that ends it early becomes a failed row."""
    if machine.kind == "gpu" and not machine.cards and check.name not in ("versions", "devices"):
        return [Row(check.name, check.about, left_out="needs a GPU")]
    rows = []
    try:
        rows.extend(check.rows(machine))
    except subprocess.TimeoutExpired as late:
        problem = f"a job must end within {late.timeout:.0f} s: {' '.join(late.cmd[-6:])}"
        rows.append(Row(check.name, check.about, problems=[problem]))
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        rows.append(Row(check.name, check.about, problems=[f"…{lines[-SHOWN:]}"]))
    return rows
