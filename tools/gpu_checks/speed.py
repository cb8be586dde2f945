"""Rows on memory and speed: ours against the stock strategies, with both weights compared."""

import functools
import math
from collections.abc import Iterator

from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row

# Fraction by which our memory may exceed that of stock.
MORE_MEMORY = 0.25
# Largest allowed difference of weights after 40 steps in float32.
TOLERANCE = 1e-4
NO_SHARING = "Horovod is built with NCCL, which refuses two ranks on one card"
PEERS = {
    "mirrored": ("MirroredStrategy", "stock MirroredStrategy under Keras's fit"),
    "multi_worker": ("MultiWorkerMirroredStrategy", "a loop under the stock strategy"),
    "horovod": ("HorovodStrategy", "a loop over Horovod's all-reduce"),
}


@functools.cache
def run(machine: Machine, strategy: str, side: str, size: int) -> dict:
    """Runs a training and returns its report.

    Args:
        machine: Devices to run on.
        strategy: "mirrored", "multi_worker" or "horovod".
        side: "ours" or "stock".
        size: Number of devices: all of one process, or one per rank.
    """
    if strategy == "mirrored":
        return machine.alone("speed", strategy, "--side", side, "--devices", str(size))
    cards = str(min(machine.cards, size) if machine.kind == "gpu" else 1)
    arguments = ("speed", strategy, "--side", side, "--cards", cards)
    if strategy == "horovod":
        return machine.ranks(*arguments, processes=size)
    return machine.workers(*arguments, workers=size)


def memory(machine: Machine) -> Iterator[Row]:
    """Yields rows of each strategy's peak memory and its peer's."""
    for strategy, (name, peer) in PEERS.items():
        # A single device if the machine has no other: ranks share it.
        size = machine.cards if strategy == "mirrored" and machine.cards < 2 else 2
        shared = machine.has_gpu and machine.cards < 2
        if strategy == "horovod" and shared and machine.has_nccl_in_horovod:
            yield Row(f"memory: {name}", "", left_out=NO_SHARING)
            continue
        ours, stock = (run(machine, strategy, side, size) for side in ("ours", "stock"))
        yield memory_row(f"memory: {name}, {size} replicas", peer, ours, stock, machine.kind)


def memory_row(name: str, peer: str, ours: dict, stock: dict, kind: str) -> Row:
    """Returns the row of two trainings' memory."""
    of = "a process's resident memory" if kind == "cpu" else "a GPU's memory"
    row = Row(
        name,
        f"The peak of {of} is at most {MORE_MEMORY:.0%} above that of {peer}; weights are the "
        f"same within {TOLERANCE:g}.",
    )
    row.figures = {
        "ours": f"{ours['peak'] / 2**20:.0f} MiB",
        "stock": f"{stock['peak'] / 2**20:.0f} MiB",
    }
    row.require_close(ours["weights"], stock["weights"], TOLERANCE, "stock")
    row.require_moved(ours["before"], ours["weights"], 5 * TOLERANCE)
    row.require(
        0 < ours["peak"] <= (1 + MORE_MEMORY) * stock["peak"],
        f"the peak must be at most {MORE_MEMORY:.0%} above stock's, not "
        f"{ours['peak'] / max(1, stock['peak']) - 1:+.0%}",
    )
    return row


def scaling(machine: Machine) -> Iterator[Row]:
    """Yields rows of images per second on one and on all devices, ours and stock."""
    for strategy, (name, peer) in PEERS.items():
        title = f"scaling: {name}, 1 to {machine.cards} devices"
        if machine.cards < 2:
            yield Row(f"scaling: {name}", "", left_out="needs two GPUs")
            continue
        one, ours, stock = (
            run(machine, "mirrored", "ours", 1),
            run(machine, strategy, "ours", machine.cards),
            run(machine, strategy, "stock", machine.cards),
        )
        yield scaling_row(title, peer, one, ours, stock)


def scaling_row(name: str, peer: str, one: dict, ours: dict, stock: dict) -> Row:
    """Returns the row of trainings on one and on several devices.

    Args:
        name: Name of the row.
        peer: Name of the peer.
        one: Our report on one device.
        ours: Our report on all devices.
        stock: The peer's report on all devices.
    """
    row = Row(
        name,
        f"Weights are those of one device, and those of {peer}, within {TOLERANCE:g}; images a "
        f"second are shown.",
    )
    of_one, of_all, of_peer = (d["images"] for d in (one, ours, stock))
    row.figures = {
        "ours": f"{of_one:.0f} to {of_all:.0f} images/s ({of_all / of_one:.2f}x)",
        "stock": f"{of_peer:.0f} images/s",
    }
    for speed in (of_all, of_peer):
        row.require(math.isfinite(speed) and speed > 0, f"a speed must be finite, not {speed}")
    row.require_close(ours["weights"], one["weights"], TOLERANCE, "one device")
    row.require_close(ours["weights"], stock["weights"], TOLERANCE, "stock")
    row.require_moved(ours["before"], ours["weights"], 5 * TOLERANCE)
    return row
