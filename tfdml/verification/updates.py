"""Distance of compressed updates from uncompressed ones, weight by weight: `--against none`."""

import dataclasses
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tfdml.verification import record
from tfdml.verification.aligning import RecordedRun


@dataclasses.dataclass(frozen=True)
class ComparedUpdate:
    """A weight's update in a compressed run beside that of an uncompressed one.

    Attributes:
        name: Name of the weight.
        first: Norm of the difference of the updates of the first step, relative to the
            uncompressed update's.
        all: The same for what all steps together have changed.
        cosine: Cosine of the angle between what all steps have changed; 1 for the same direction.
    """

    name: str
    first: float
    all: float
    cosine: float


def compare_updates(compressed: RecordedRun, uncompressed: RecordedRun) -> list[ComparedUpdate]:
    """Compares the updates of two runs that start from the same weights.

    Args:
        compressed: The run with a codec.
        uncompressed: The run without.
    """
    names = [name for step, kind, name in uncompressed.tensors if (step, kind) == _INITIAL]
    last = min(compressed.facts["steps"], uncompressed.facts["steps"]) - 1
    found = []
    for name in names:
        early, late = (
            [_update(run, name, step) for run in (compressed, uncompressed)] for step in (0, last)
        )
        if not any(np.any(update) for update in late):
            continue  # A weight that is not trained.
        found.append(ComparedUpdate(name, _distance(*early), _distance(*late), _cosine(*late)))
    return found


_INITIAL = (-1, record.WEIGHT)


def _update(run: RecordedRun, name: str, step: int) -> np.ndarray:
    """Returns what a run has changed of a weight, or projections, up to the end of a step.

    Projections with random signs keep the norm, on average.
    """
    after = run.whole((step, record.WEIGHT, name))[0]
    return after - run.whole((*_INITIAL, name))[0]


def _distance(update: np.ndarray, reference: np.ndarray) -> float:
    size = np.linalg.norm(reference)
    return float(np.linalg.norm(update - reference) / size) if size else np.inf


def _cosine(update: np.ndarray, reference: np.ndarray) -> float:
    sizes = np.linalg.norm(update) * np.linalg.norm(reference)
    return float(np.sum(update * reference) / sizes) if sizes else 0.0


def updates_as_dict(updates: list[ComparedUpdate], run: RecordedRun) -> dict[str, Any]:
    """Returns the comparison as values for JSON; updates that are off are no error.

    Args:
        updates: The updates.
        run: The compressed run.
    """
    facts = {name: run.facts[name] for name in ("strategy", "replicas", "steps")}
    return {"same": True, **facts, "updates": [dataclasses.asdict(update) for update in updates]}


def show_updates(updates: list[ComparedUpdate], run: RecordedRun, console: Console) -> None:
    """Prints the comparison.

    Args:
        updates: The updates.
        run: The compressed run.
        console: Where to print.
    """
    steps = run.facts["steps"]
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("weight", "first update off by", f"{steps} steps off by", "cosine"):
        table.add_column(title, justify="left" if title == "weight" else "right")
    for update in updates:
        numbers = (_percent(update.first), _percent(update.all), f"{update.cosine:.3f}")
        table.add_row(update.name, *numbers)
    console.print(table)
    worst = max(updates, key=lambda update: update.all)
    console.print(
        f"\nCompressed updates of {run.facts['replicas']} replicas beside uncompressed ones: "
        f"`{worst.name}` is farthest off, by {_percent(worst.all)} after {steps} steps."
    )


def _percent(fraction: float) -> str:
    """Returns a fraction as percent; of a small one, as of half precision, its first digit."""
    return f"{fraction:.1%}" if fraction == 0 or fraction >= 0.001 else f"{100 * fraction:.1g}%"
