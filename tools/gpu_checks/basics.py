"""Rows on versions and devices."""

import shutil
import subprocess
from collections.abc import Iterator

from tfdml.cli.checks import versions as ranges
from tfdml.cli.checks.finding import Status
from tfdml.horovod_build.loaded import Loaded
from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row

# Largest allowed error of a product of 256 x 256 float32 matrices with values near 1: about 4e-5 is
# usual. With a 10-bit mantissa, as in TF32, it is about 0.03.
PRODUCT_ERROR = 1e-3


def versions(machine: Machine) -> Iterator[Row]:
    """Yields the row on installed versions, and whether tfdml supports them."""
    row = Row("versions", "tfdml is for these versions of Python, TensorFlow and Keras.")
    for check in (ranges.check_python, ranges.check_tensorflow, ranges.check_keras):
        finding = check()
        row.figures[finding.name] = " ".join(finding.what.split())
        row.require(finding.status is Status.OK, f"{finding.name} {finding.what}: {finding.fix}")
    loaded = machine.horovod
    if isinstance(loaded, Loaded):
        row.figures["Horovod"] = f"{loaded.version} with {', '.join(loaded.transports)}"
    else:
        row.require(False, f"Horovod must load: `tfdml build-horovod`. It said: {loaded}")
    if machine.kind == "gpu":
        row.figures |= {
            "CUDA": machine.look["cuda"],
            "cuDNN": machine.look["cudnn"],
            "driver": _driver(),
        }
        row.require(
            machine.look["with_cuda"], "TensorFlow must be built with CUDA: `tensorflow[and-cuda]`"
        )
    yield row


def devices(machine: Machine) -> Iterator[Row]:
    """Yields a row for each device, which must multiply as NumPy does."""
    found = machine.look["devices"]
    if not found:
        row = Row("devices", "TensorFlow sees a GPU.")
        row.require(False, "TensorFlow sees none: `tfdml doctor` and `nvidia-smi` may tell why")
        yield row
    for device in found:
        row = Row(f"device {device['name']}", "A float32 product of matrices is NumPy's.")
        capability = device["capability"]
        row.figures = {
            "kind": device["kind"] or "processor",
            **({"compute capability": capability} if capability else {}),
            "largest error": f"{device['error']:.1e}",
        }
        on = device["on"].rpartition("device:")[2]
        row.require(on == device["name"], f"it must be computed on {device['name']}, not {on}")
        row.require(
            device["error"] <= PRODUCT_ERROR,
            f"the error must be at most {PRODUCT_ERROR:g}, not {device['error']:.3g}",
        )
        yield row


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not on PATH"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ", ".join(sorted(set(done.stdout.split()))) or done.stderr.strip()[-200:]
