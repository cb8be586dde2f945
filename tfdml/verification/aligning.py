"""Tensors of the global batch, put together from the records of all replicas."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfdml.verification import record
from tfdml.verification.record import Entry, Record

Key = tuple[int, str, str]


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A recorded run.

    Attributes:
        records: The records of its ranks.
    """

    records: Sequence[Record]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of rank 0."""
        return self.records[0].facts

    @functools.cached_property
    def tensors(self) -> dict[Key, list[Entry]]:
        """The entries of each tensor by replica, in the order in which steps compute them."""
        found: dict[Key, list[Entry]] = {}
        for rank in self.records:
            for entry in rank.entries:
                found.setdefault(entry.key, []).append(entry)
        return {key: sorted(entries, key=lambda e: e.replica) for key, entries in found.items()}

    def digests(self, step: int) -> list[np.ndarray]:
        """Returns the digests of each replica's rows in a step: uint64, shape `[rows]` each."""
        return [entry.values for entry in self.tensors.get((step, record.ROWS, "batch"), ())]

    def rows(self, step: int) -> np.ndarray:
        """Returns the digests of all rows of a step, in the order of replicas."""
        return np.concatenate([np.zeros(0, np.uint64), *self.digests(step)])

    @functools.cached_property
    def _largest_gradients(self) -> dict[int, float]:
        largest: dict[int, float] = {}
        for key in self.tensors:
            if key[1] == record.GRADIENT:
                found = float(np.max(np.abs(self.whole(key)[0]), initial=0.0))
                largest[key[0]] = max(found, largest.get(key[0], 0.0))
        return largest

    def largest_gradient(self, step: int) -> float:
        """Returns the largest number of all gradients of a step."""
        return self._largest_gradients.get(step, 0.0)

    def whole(self, key: Key, entries: Iterable[Entry] | None = None) -> list[np.ndarray]:
        """Returns a tensor of the global batch; a list of as many as there are versions of it.

        Args:
            key: The tensor's key.
            entries: Its entries; those of all replicas by default.
        """
        entries = self.tensors[key] if entries is None else list(entries)
        values = [entry.values for entry in entries]
        layout = entries[0].layout
        if layout == record.AS_SAME:
            return values
        if len({v.shape[1:] if layout == record.BY_ROWS else v.shape for v in values}) > 1:
            return values
        if layout == record.BY_ROWS:
            return [np.concatenate(values)]
        if layout == record.AS_SUM:
            return [np.sum(values, axis=0)]
        counts = [len(d) for d in self.digests(key[0])]
        parts = [v * n / sum(counts) for v, n in zip(values, counts, strict=True) if n]
        return [np.sum(parts, axis=0)]


def order_of_rows(rows: np.ndarray, reference: np.ndarray) -> np.ndarray | None:
    """Returns the positions at which a run has the reference's rows; None if it has other rows.

    Args:
        rows: Digests of the run's rows.
        reference: Digests of the reference's rows.
    """
    if np.array_equal(rows, reference):
        return np.arange(len(rows))
    if not np.array_equal(np.sort(rows), np.sort(reference)):
        return None
    positions = np.empty(len(rows), np.int64)
    positions[np.argsort(reference, kind="stable")] = np.argsort(rows, kind="stable")
    return positions
