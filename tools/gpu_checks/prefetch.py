"""Row on prefetching: data must be on its device before a step asks for it."""

from collections.abc import Iterator

from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row


def prefetch(machine: Machine) -> Iterator[Row]:
    """Yields the row on where two devices' batches are when a step receives them."""
    yield row_of(machine.alone("prefetch"), machine.kind)


def row_of(told: dict, kind: str) -> Row:
    """Returns the row for a report of `tools.gpu_checks.jobs.prefetch`."""
    row = Row(
        "prefetch to the devices",
        "Each replica's rows are on its device, and the next batches come before they are asked "
        "for.",
    )
    row.figures = {"batches": str(len(told["parts"])), "ahead": str(told["ahead"])}
    for number, devices in enumerate(told["parts"]):
        on = [device.rpartition("device:")[2] for device in devices]
        row.require(on == told["devices"], f"batch {number} must be on {told['devices']}, not {on}")
    row.require(bool(told["parts"]), "there must be batches")
    row.require(told["ahead"] >= 1, "a batch must come before it is asked for")
    if kind == "gpu":
        row.rule += " `fit` copies ahead."
        row.require(told["fit copies ahead"], "`fit` must copy ahead where there are GPUs")
    return row
