"""Record of a run's first steps, as each rank writes it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

# The kinds of tensors, in the order in which a step computes them.
ROWS, OUTPUT, LOSS, GRADIENT = "rows", "output", "loss", "gradient"
SUM, RATE, WEIGHT, METRIC = "summed gradient", "learning rate", "weight", "metric"
KINDS = (ROWS, OUTPUT, LOSS, GRADIENT, SUM, RATE, WEIGHT, METRIC)
# How the tensors of replicas make up the tensor of the global batch: replicas have rows of it, or
# estimates of which it is the mean by rows, or its summands, or each has all of it.
BY_ROWS, AS_MEAN, AS_SUM, AS_SAME = "rows", "mean", "sum", "same"
# Rows by which a BatchNormalization says that it normalises: a replica's, or all of a batch.
OWN_ROWS, WHOLE_BATCH = "own rows", "whole batch"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a step on one replica.

    Attributes:
        step: Number of the step, from 0; -1 for initial weights.
        kind: One of `KINDS`.
        name: Name of the layer, loss, variable or metric.
        replica: Number of the replica in the job.
        layout: `BY_ROWS`, `AS_MEAN`, `AS_SUM` or `AS_SAME`.
        size: Numbers of each row, or of the tensor, before they were projected.
        values: Digests of rows, uint64 of shape `[rows]`; else projections, float64 of shape
            `[rows, n]` or `[n]`.
    """

    step: int
    kind: str
    name: str
    replica: int
    layout: str
    size: int
    values: np.ndarray

    @property
    def key(self) -> tuple[int, str, str]:
        """Step, kind and name, which the entries of all replicas for one tensor share."""
        return self.step, self.kind, self.name


@dataclasses.dataclass
class Record:
    """Record of one rank.

    Attributes:
        entries: The tensors, in the order in which they were computed.
        facts: Other facts of the run: values for JSON.
    """

    entries: list[Entry]
    facts: dict[str, Any]

    def save(self, directory: Path, rank: int) -> None:
        """Writes the record of a rank."""
        directory.mkdir(parents=True, exist_ok=True)
        names = [f.name for f in dataclasses.fields(Entry) if f.name != "values"]
        about = [{name: getattr(entry, name) for name in names} for entry in self.entries]
        arrays = {str(i): entry.values for i, entry in enumerate(self.entries)}
        np.savez(directory / f"rank{rank}.npz", **arrays)
        text = json.dumps({"entries": about, "facts": self.facts}, default=str)
        (directory / f"rank{rank}.json").write_text(text, encoding="utf-8")


def load(directory: Path) -> list[Record]:
    """Reads the records of all ranks of a run, in the order of ranks."""
    files = sorted(directory.glob("rank*.json"), key=lambda f: int(f.stem.removeprefix("rank")))
    records = []
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        with np.load(file.with_suffix(".npz")) as arrays:
            entries = [
                Entry(**about, values=arrays[str(i)]) for i, about in enumerate(content["entries"])
            ]
        records.append(Record(entries, content["facts"]))
    return records
