"""Rows on the codecs: their error and speed, and that none copies payload to the host."""

from collections.abc import Iterator

from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row

# Largest allowed copy to or from the host in bytes: a scalar or a shape, never a payload.
SMALL = 4096
# Tolerances between a codec's error on a device and on a CPU: random numbers may differ, and so may
# the rounding of a value on the border between two codes.
RELATIVE, ABSOLUTE = 0.02, 1e-4


def codecs(machine: Machine) -> Iterator[Row]:
    """Yields a row for each codec, and the control row of the search for copies."""
    found = machine.alone("codecs")
    for one in found["codecs"]:
        yield row_of(one, found["bytes"], machine.kind)
    yield control(found["control"], found["bytes"], machine.kind)


def row_of(one: dict, size: int, kind: str) -> Row:
    """Returns the row of a codec.

    Args:
        one: Report of `tools.gpu_checks.jobs.codecs` on it.
        size: Size of the gradient in bytes.
        kind: "cpu" or "gpu".
    """
    row = Row(f"codec {short(one['name'])}", "It leaves out of a gradient what it does on a CPU.")
    row.figures = {
        "GB/s": f"{size / one['seconds'] / 1e9:.2f}",
        "left out": f"{one['error']:.1%}",
        "on a CPU": f"{one['on a processor']:.1%}",
    }
    off = abs(one["error"] - one["on a processor"])
    limit = RELATIVE * one["on a processor"] + ABSOLUTE
    row.require(off <= limit, f"what is left out must be within {limit:.2g}, not {off:.2g}")
    row.require(one["events"] > 0, "the profile must have events")
    if kind == "cpu":
        row.figures["copies to or from the host"] = "needs a GPU"
        return row
    row.rule += f" No copy of more than {SMALL} bytes goes to or from the host."
    large = [copied for copied in one["copies"] if copied > SMALL]
    row.figures["copies to or from the host"] = f"{len(one['copies'])}, {len(large)} large"
    on = one["on"].rpartition("device:")[2]
    row.require(on.startswith("GPU"), f"the sum must be on the GPU, not on {on}")
    row.require(not large, f"copies to or from the host must be small, not {large[:5]} bytes")
    return row


def short(name: str) -> str:
    """Returns a codec's name with its first argument, and whether it is randomized."""
    kind, _, arguments = name.rstrip(")").partition("(")
    random = ", stochastic" if "stochastic=True" in arguments else ""
    return f"{kind}({arguments.split(', ')[0]}{random})"


def control(sizes: list[int] | None, size: int, kind: str) -> Row:
    """Returns the control row: a deliberate copy that the search must find."""
    row = Row("copies in the profile", "Where the sum is read on the host, its copy is found.")
    if kind == "cpu":
        row.left_out = "needs a GPU"
        return row
    row.figures["largest copy"] = f"{max(sizes, default=0)} bytes of {size}"
    row.require(max(sizes, default=0) >= size, f"a copy of {size} bytes must be in the profile")
    return row
