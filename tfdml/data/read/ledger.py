"""Ledger of the samples that each step used, to prove an epoch exact across crashes and resizes.

Every worker appends to its own file in each run. One kind of line has the ids that were read for a
position of an epoch, another the batches that were used: samples that were only read ahead do not
count.
"""

import json
import os
import secrets
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.data.read.position import Position
from tfdml.row_split import LocalReplicas


class Ledger:
    """Ledger file of one worker.

    Args:
        directory: Directory of the ledger files of all workers and runs.
        worker: Replicas of this worker.
        recipe: Data and options that determine the order.
    """

    def __init__(self, directory: str, worker: LocalReplicas, recipe: dict[str, Any]):
        os.makedirs(directory, exist_ok=True)
        name = f"{secrets.token_hex(6)}-{worker.first_replica}-of-{worker.num_replicas}.jsonl"
        # Open for as long as the pipeline lives; each line is flushed.
        self._file = Path(directory, name).open("a", encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()
        self._write({"recipe": recipe})

    def _write(self, note: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(note, separators=(",", ":")) + "\n")
            self._file.flush()

    def read(self, epoch: int, sample: int, ids: np.ndarray) -> None:
        """Notes the ids that are read for the batch that begins at a sample."""
        self._write({"epoch": epoch, "sample": sample, "ids": ids.tolist()})

    def used(self, start: Position, begin: int, end: int, batch_size: int) -> None:
        """Notes that batches `begin` to `end` (exclusive) of a pass have been used."""
        first = start.sample + begin * batch_size
        last = start.sample + end * batch_size
        self._write({"used": [start.epoch, first, last]})


class Account:
    """Evaluation of a directory of ledger files.

    A batch that was used again after a resume counts once: the effect of its first use on the
    weights was lost in the crash.

    Args:
        directory: Directory of the ledger files of all workers and runs.

    Attributes:
        epochs: Number of samples used in each epoch.
        problems: Deviations from an exact epoch, in words.
        unfinished: Epochs that have not been used to their end.

    Raises:
        ValueError: If the directory has no ledger files.
    """

    def __init__(self, directory: str):
        self.problems: list[str] = []
        self.epochs: dict[int, int] = {}
        self.unfinished: list[int] = []
        notes = [_read_notes(path) for path in sorted(Path(directory).glob("*.jsonl"))]
        if not notes:
            raise ValueError(
                f"`ledger` must be a directory with a ledger. Received: {directory!r}."
            )
        self._recipe = notes[0][0]
        if any(recipe != self._recipe for recipe, _ in notes):
            self.problems.append("the runs differ in their data, order or batch size")
        used: dict[int, dict[int, set[int]]] = defaultdict(dict)
        for _, batches in notes:
            for (epoch, sample), ids in batches.items():
                used[epoch].setdefault(sample, set()).update(ids)
        for epoch, batches in sorted(used.items()):
            self._count(epoch, batches, is_last=epoch == max(used))
        if not self.epochs:
            self.problems.append("no batch was used, so the ledger proves nothing")

    def _count(self, epoch: int, batches: dict[int, set[int]], is_last: bool) -> None:
        records, size = self._recipe["records"], self._recipe["batch_size"]
        samples = records // size * size if self._recipe["end"] == "drop" else records
        counts = np.zeros(records, np.int64)
        for sample, ids in sorted(batches.items()):
            np.add.at(counts, np.fromiter(ids, np.int64, len(ids)), 1)
            wanted = min(size, samples - sample)
            if len(ids) != wanted:
                self.problems.append(
                    f"epoch {epoch}, the batch from sample {sample} on: {len(ids)} samples used "
                    f"instead of {wanted}"
                )
        self.epochs[epoch] = int((counts > 0).sum())
        twice = np.flatnonzero(counts > 1)
        if len(twice):
            self.problems.append(f"epoch {epoch}: {len(twice)} samples used twice, {_some(twice)}")
        missing = samples - self.epochs[epoch]
        gaps = [s for s in range(0, max(batches), size) if s not in batches]
        if gaps or (missing and not is_last):
            never = np.flatnonzero(counts == 0)
            self.problems.append(f"epoch {epoch}: {missing} samples never used, {_some(never)}")
        elif missing:
            self.unfinished.append(epoch)


def _some(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:5].tolist()))
    return f"ids {shown}{', ...' if len(ids) > 5 else ''}"


def _read_notes(path: Path) -> tuple[dict[str, Any], dict[tuple[int, int], list[int]]]:
    """Returns a file's recipe, and the ids of the batches that were used."""
    recipe: dict[str, Any] = {"records": 0}
    read: dict[tuple[int, int], list[int]] = {}
    used: list[list[int]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            note = json.loads(line)
        except ValueError:
            # The last line of a worker that was killed may be incomplete.
            continue
        if "recipe" in note:
            recipe = note["recipe"]
        elif "used" in note:
            used.append(note["used"])
        else:
            read[note["epoch"], note["sample"]] = note["ids"]
    return recipe, {
        (epoch, sample): ids
        for (epoch, sample), ids in read.items()
        if any(epoch == e and begin <= sample < end for e, begin, end in used)
    }
