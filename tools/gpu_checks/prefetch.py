"""Row on prefetching: data must be on its device before a step asks for it."""

from collections.abc import Iterator

from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row


def prefetch(machine: Machine) -> Iterator[Row]:
    """Yields the row on where two devices' batches are when a step receives them."""
    yield row_of(machine.alone("prefetch"), machine.kind)


def row_of(report: dict, kind: str) -> Row:
    """Returns the row for a report of `tools.gpu_checks.jobs.prefetch`."""
    row = Row(
        "prefetch to the devices",
        "Each replica's rows are on its device, and the next batches come before they are asked "
        "for.",
    )
    row.figures = {"batches": str(len(report["parts"])), "ahead": str(report["ahead"])}
    for number, devices in enumerate(report["parts"]):
        on = [device.rpartition("device:")[2] for device in devices]
        row.require(
            on == report["devices"], f"batch {number} must be on {report['devices']}, not {on}"
        )
    row.require(bool(report["parts"]), "there must be batches")
    row.require(report["ahead"] >= 1, "a batch must come before it is asked for")
    if kind == "gpu":
        row.rule += " `fit` copies ahead."
        row.require(report["fit copies ahead"], "`fit` must copy ahead where there are GPUs")
    return row
