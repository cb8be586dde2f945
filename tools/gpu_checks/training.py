"""Rows on training: each strategy, in each numeric variant, against plain Keras on one device."""

import functools
from collections.abc import Iterator

from tools.gpu_checks.machine import Machine
from tools.gpu_checks.row import Row
from tools.gpu_checks.speed import NO_SHARING

# Largest allowed difference of weights from one device's after 8 steps, by variant. With an 8-bit
# mantissa, a sum in another order differs by much; weights move by 0.08 and more.
TOLERANCES = {"float32": 1e-4, "XLA": 1e-4, "mixed_float16": 5e-3, "mixed_bfloat16": 2e-2}
RULE = "Weights and losses are plain Keras's on one device"
BUILD = "`tfdml build-horovod --nccl`"


@functools.cache
def reference(machine: Machine) -> dict:
    """Returns the results of plain Keras on one device."""
    return machine.alone("train", "plain")


def two_logical(machine: Machine) -> Iterator[Row]:
    """Yields rows of `MirroredStrategy` on two logical devices of one card."""
    found = machine.alone("train", "mirrored", "--devices", "2", "--split")
    yield from compared("MirroredStrategy, two logical devices of one card", found, machine)


def two_ranks(machine: Machine) -> Iterator[Row]:
    """Yields rows of `HorovodStrategy` on two ranks that share a card."""
    name = "HorovodStrategy, two gloo ranks on one card"
    if machine.kind == "gpu" and machine.has_nccl_in_horovod:
        yield Row(name, f"{RULE}.", left_out=NO_SHARING)
        return
    yield from compared(name, machine.ranks("train", "horovod"), machine)


def two_workers(machine: Machine) -> Iterator[Row]:
    """Yields rows of `MultiWorkerMirroredStrategy` on two workers that share a card."""
    found = machine.workers("train", "multi_worker", "--exchange", "ring")
    yield from compared("MultiWorkerMirroredStrategy, two workers on one card", found, machine)


def nccl(machine: Machine) -> Iterator[Row]:
    """Yields rows of each strategy with NCCL all-reduce between the cards."""
    names = [f"{s}Strategy, NCCL" for s in ("Mirrored", "MultiWorkerMirrored", "Horovod")]
    if not machine.has_gpu or machine.cards < 2:
        for name in names:
            reason = "needs two GPUs" if machine.has_gpu else "needs a GPU: two of them"
            yield Row(name, f"{RULE}.", left_out=reason)
        return
    cards = str(machine.cards)
    short = ("--variant", "float32", "--variant", "mixed_float16")
    arguments = ("--devices", cards, "--exchange", "nccl", *short)
    yield from compared(names[0], machine.alone("train", "mirrored", *arguments), machine)
    arguments = ("--cards", cards, "--exchange", "nccl", *short)
    found = machine.workers("train", "multi_worker", *arguments, workers=machine.cards)
    yield from compared(names[1], found, machine)
    if not machine.has_nccl_in_horovod:
        yield Row(names[2], f"{RULE}.", left_out=f"Horovod is not built with NCCL: {BUILD}")
        return
    arguments = ("--cards", cards, *short)
    found = machine.ranks("train", "horovod", *arguments, processes=machine.cards)
    yield from compared(names[2], found, machine)


def compared(name: str, found: dict, machine: Machine) -> Iterator[Row]:
    """Yields a row for each variant of a job's report."""
    for variant, result in found.items():
        yield row_of(f"{name}: {variant}", variant, result, reference(machine))


def row_of(name: str, variant: str, result: dict, references: dict) -> Row:
    """Returns the row of one training.

    Args:
        name: Name of the row.
        variant: Numeric variant.
        result: The job's report on it.
        references: Results of plain Keras by variant. A step compiled by XLA is compared with an
            uncompiled one.
    """
    of = "float32" if variant == "XLA" else variant
    expected = references[of]
    other = " without XLA" if variant == "XLA" else ""
    row = Row(name, f"{RULE}{other}, within {TOLERANCES[variant]:g}.")
    row.require_close(
        [*result["weights"], *result["losses"]],
        [*expected["weights"], *expected["losses"]],
        TOLERANCES[variant],
        "one device",
    )
    row.require_moved(expected["before"], expected["weights"], 5 * TOLERANCES[variant])
    if variant == "mixed_float16":
        row.rule += " Loss scales are the same after an overflow, and at the end."
        row.figures["loss scales"] = " and ".join(f"{scale:g}" for scale in result["scales"])
        row.require(
            result["scales"] == expected["scales"],
            f"loss scales must be {expected['scales']}, not {result['scales']}",
        )
    return row
