"""The answer of `tfdml verify`: what was compared, the first difference and its cause."""

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from tfdml.verification import record
from tfdml.verification.comparing import Comparison, Tensor
from tfdml.verification.evidence import Cause

_TITLES = {
    record.ROWS: "rows of batches",
    record.OUTPUT: "outputs of layers",
    record.LOSS: "losses",
    record.GRADIENT: "gradients of replicas, added up",
    record.SUM: "gradients after the exchange",
    record.RATE: "learning rates",
    record.WEIGHT: "weights after the update",
    record.METRIC: "metrics",
}
_NAMES = {
    record.ROWS: "the rows of the batch",
    record.OUTPUT: "the output of layer `{}`",
    record.LOSS: "the loss `{}`",
    record.GRADIENT: "the gradient of `{}`, added up over replicas",
    record.SUM: "the gradient of `{}` after the exchange",
    record.RATE: "the learning rate of `{}`",
    record.WEIGHT: "the weight `{}`",
    record.METRIC: "the metric `{}`",
}


def as_dict(comparison: Comparison, cause: Cause | None) -> dict[str, Any]:
    """Returns the answer as values for JSON."""
    first, facts = comparison.first, comparison.several.facts
    found = None
    if first is not None:
        step, kind, name = first.key
        found = {"step": step + 1, "kind": kind, "name": name, "replicas": first.replicas}
        found |= {"difference": _finite(first.distance), "rounding": _finite(first.rounding)}
    return {
        "same": first is None,
        "strategy": facts["strategy"],
        "replicas": facts["replicas"],
        "steps": facts["steps"],
        "left_out": facts["left_out"],
        "tensors": len(comparison.tensors),
        "first_difference": found,
        "cause": dataclasses.asdict(cause) if cause else None,
    }


def failure_as_dict(processes: int, cause: Cause) -> dict[str, Any]:
    """Returns the answer for a script that fails on several processes as values for JSON."""
    return {"same": False, "replicas": processes, "cause": dataclasses.asdict(cause)}


def show(comparison: Comparison, cause: Cause | None, console: Console) -> None:
    """Prints the answer.

    Args:
        comparison: The comparison.
        cause: Cause of the first difference; None if there is none.
        console: Where to print.
    """
    facts = comparison.several.facts
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("tensors", "compared", "largest difference", "rounding explains"):
        table.add_column(title, justify="left" if title == "tensors" else "right")
    for kind in record.KINDS:
        of_kind = [t for t in comparison.tensors if t.key[1] == kind]
        if of_kind:
            worst = max(of_kind, key=_excess)
            numbers = () if kind == record.ROWS else (worst.distance, worst.rounding)
            table.add_row(_TITLES[kind], str(len(of_kind)), *map(_text, numbers))
    console.print(table)
    if facts["left_out"]:
        console.print(f"Left out: {', '.join(facts['left_out'])}.")
    first = comparison.first
    if first is None or cause is None:
        console.print(
            f"\n{facts['strategy']} on {facts['replicas']} replicas trains as one does: "
            f"{facts['steps']} steps, nothing differs by more than rounding."
        )
        return
    step, kind, name = first.key
    when = f"in step {step + 1}" if step >= 0 else "before the first step"
    console.print(f"\nThe first that differs, {when}: {_NAMES[kind].format(name)}")
    replicas = ", ".join(map(str, first.replicas))
    if math.isfinite(first.distance):
        console.print(
            f"  off by {first.distance:.1e} of the largest number, on replicas {replicas}; "
            f"rounding explains {first.rounding:.1e}"
        )
    show_cause(cause, console)


def show_cause(cause: Cause, console: Console) -> None:
    """Prints a cause and its fix."""
    console.print(f"Cause: {cause.name}. {cause.words}")
    console.print(f"Fix: {cause.fix}")


def _excess(tensor: Tensor) -> float:
    return tensor.distance / tensor.rounding if tensor.rounding else tensor.distance


def _text(number: float) -> str:
    return f"{number:.1e}" if math.isfinite(number) else "other tensors"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
