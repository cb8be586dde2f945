"""Rows on training with compressed gradients: its loss on a card is that on a processor."""

from collections.abc import Iterator

from tools.gpu_checks.codecs import short
from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row
from tools.gpu_checks.speed import NO_SHARING

# Largest allowed relative difference of the last loss: rounding that differs in the last bit may
# change a code, or which values are the largest.
TOLERANCE = 0.05


def compressed(machine: Machine) -> Iterator[Row]:
    """Yields a row for each codec, trained by two ranks of Horovod that share a card."""
    if machine.kind == "gpu" and machine.has_nccl_in_horovod:
        yield Row("training with codecs", "", left_out=NO_SHARING)
        return
    found = machine.ranks("compressed")
    expected = Machine("cpu", {}).ranks("compressed") if machine.kind == "gpu" else found
    for name, losses in found.items():
        yield row_of(name, losses, expected[name])


def row_of(name: str, losses: list[float], expected: list[float]) -> Row:
    """Returns the row of a codec.

    Args:
        name: Name of the codec.
        losses: Loss of each epoch.
        expected: The same on processors.
    """
    row = Row(
        f"training with {short(name)}",
        f"Two ranks: the loss falls, and ends within {TOLERANCE:.0%} of that on a processor.",
    )
    first, last = losses[0], losses[-1]
    row.figures = {"loss": f"{first:.4f} to {last:.4f}", "on a processor": f"{expected[-1]:.4f}"}
    row.require(last < first, f"the loss must fall, not go from {first:.4g} to {last:.4g}")
    off = abs(last / expected[-1] - 1)
    row.require(off <= TOLERANCE, f"the last loss must be within {TOLERANCE:.0%}, not {off:.1%}")
    return row
