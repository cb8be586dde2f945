"""Sampling at fixed ratios: several data sets mixed.

An epoch is cut into cycles. Each cycle holds exactly its share of every group, in a permuted order.
The k-th draw from a group is the k-th record of that group's own order, which starts over when it
is used up. So this order is arithmetic too: any position of any epoch can be computed directly, and
a group that is partly used continues in the next epoch where it stopped.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tfdml.data.format.manifest import DatasetManifest
from tfdml.data.order import CHOICES, Layout, Order, Sequential, Shuffled, permutation
from tfdml.data.read.blocks import BlockReader, window_bytes
from tfdml.data.read.caching import block_reader
from tfdml.data.read.dataset import RecordDataset, Shuffling

# Number of draws in a cycle: ratios are exact to one part in this many.
CYCLE = 10_000


class Group(Protocol):
    """Set of records to draw from."""

    def order(self, number: int) -> Order:
        """Returns the order of the records in the `number`-th pass over them, from 0."""

    def __len__(self) -> int:
        """Returns the number of records."""


class Mixed:
    """Order of an epoch that draws from groups at fixed ratios.

    Args:
        groups: Groups to draw from.
        ratios: Share of each group; they sum to 1.
        length: Number of draws in an epoch.
        seed: Seed of the order within each cycle.
        epoch: Number of the epoch.
    """

    def __init__(
        self, groups: Sequence[Group], ratios: Sequence[float], length: int, seed: int, epoch: int
    ):
        self._groups, self._ratios, self._length = list(groups), list(ratios), length
        self._key = (seed, epoch)
        whole, rest = divmod(length, CYCLE)
        self._counts = counts_of(ratios, CYCLE)
        self._first = epoch * (whole * self._counts + counts_of(ratios, rest))
        self._ids_of = functools.lru_cache(maxsize=4)(self._cycle)

    def __len__(self) -> int:
        return self._length

    def ids(self, begin: int, end: int) -> np.ndarray:
        """Returns the ids of the records at positions `begin` to `end` (exclusive): int64."""
        end = min(end, self._length)
        parts = [np.empty(0, np.int64)]
        while begin < end:
            cycle = begin // CYCLE
            first = cycle * CYCLE
            stop = min(end, first + CYCLE)
            parts.append(self._ids_of(cycle)[begin - first : stop - first])
            begin = stop
        return np.concatenate(parts)

    def _cycle(self, cycle: int) -> np.ndarray:
        """Returns the ids of all draws of a cycle."""
        size = min(CYCLE, self._length - cycle * CYCLE)
        counts = self._counts if size == CYCLE else counts_of(self._ratios, size)
        group_of = np.repeat(np.arange(len(counts)), counts)
        group_of = group_of[permutation(size, *self._key, CHOICES, cycle)]
        ids = np.empty(size, np.int64)
        for number, (group, count) in enumerate(zip(self._groups, counts.tolist(), strict=True)):
            first = int(self._first[number] + cycle * self._counts[number])
            ids[group_of == number] = _draw(group, first, count)
        return ids


def counts_of(ratios: Sequence[float], positions: int) -> np.ndarray:
    """Returns the number of `positions` that each ratio gets, by the largest remainders: int64."""
    exact = np.asarray(ratios, np.float64) * positions
    counts = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: positions - int(counts.sum())]] += 1
    return counts


def _draw(group: Group, first: int, count: int) -> np.ndarray:
    """Returns the ids of draws `first` to `first + count` (exclusive) from a group."""
    parts = [np.empty(0, np.int64)]
    while count:
        number, position = divmod(first, len(group))
        taken = min(count, len(group) - position)
        parts.append(group.order(number).ids(position, position + taken))
        first, count = first + taken, count - taken
    return np.concatenate(parts)


class LayoutGroup:
    """Group of all records of a data set, ordered as the data set alone would be.

    Args:
        layout: Layout of the records.
        first_id: Id of the data set's first record in the mixture.
        key: Number that makes this group's orders differ from those of other groups.
        shuffling: Options for the order.
    """

    def __init__(self, layout: Layout, first_id: int, key: int, shuffling: Shuffling):
        self._layout, self._first_id = layout, first_id
        self._key, self._shuffling = key, shuffling
        self.order = functools.lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return self._layout.records

    def _order(self, number: int) -> Order:
        shuffling = self._shuffling
        if shuffling.seed is None:
            order: Order = Sequential(self._layout)
        else:
            number = number if shuffling.reshuffle else 0
            order = Shuffled(
                self._layout,
                shuffling.seed + (self._key << 40),
                number,
                shuffling.window,
                shuffling.shards_at_once,
                shuffling.keep_shards,
            )
        return _ShiftedIds(order, self._first_id)


class _ShiftedIds:
    """Order with an offset added to its ids."""

    def __init__(self, order: Order, first_id: int):
        self._order, self._first_id = order, first_id

    def __len__(self) -> int:
        return len(self._order)

    def ids(self, begin: int, end: int) -> np.ndarray:
        return self._order.ids(begin, end) + self._first_id


class MixedDataset:
    """Several data sets, drawn from at fixed ratios.

    Args:
        datasets: Data sets to draw from.
        ratios: Share of each data set, with any sum; None for shares by number of records.
        length: Number of draws in an epoch; None for the number of records of all data sets.

    Raises:
        ValueError: If the ratios are not one positive number for each data set.
    """

    def __init__(
        self,
        datasets: Sequence[RecordDataset],
        ratios: Sequence[float] | None,
        length: int | None,
    ):
        self._datasets = list(datasets)
        self.records = sum(d.records for d in datasets)
        if ratios is None:
            ratios = [d.records for d in datasets]
        if len(ratios) != len(datasets):
            raise ValueError(
                f"`ratios` must have a number for each data set. Received: {len(ratios)} numbers "
                f"for {len(datasets)} data sets."
            )
        self._ratios = normalised(ratios)
        self._length = length or self.records

    @property
    def manifest(self) -> DatasetManifest:
        """Manifest of the first data set; the features that are read are the same in all."""
        return self._datasets[0].manifest

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, equal only if two mixtures draw the same from the same data."""
        return digest_of([d.digest for d in self._datasets], self._ratios, self._length)

    def check_features(self, names: Sequence[str]) -> None:
        """Raises a ValueError if the data sets differ in these features."""
        first = self.manifest.schema
        for dataset in self._datasets[1:]:
            other = dataset.manifest.schema
            differ = [n for n in names if other.get(n) != first[n]]
            if differ:
                raise ValueError(
                    f"`path` must be data sets with the same features. Received: {differ[0]!r} as "
                    f"{first[differ[0]]} in {self.manifest.directory}, and as "
                    f"{other.get(differ[0])} in {dataset.manifest.directory}."
                )

    def default_window(self) -> int:
        """Returns a window for each data set, so that together they use the usual memory."""
        return max(1, min(d.default_window() for d in self._datasets) // len(self._datasets))

    def reader(self, window: int, cache: str | None = None) -> BlockReader:
        """Returns a reader of all data sets that caches the blocks of two windows of each."""
        paths = [p for d in self._datasets for p in d.paths]
        indices = [i for d in self._datasets for i in d.indices]
        limit = sum(max(2 * window_bytes(window, d.indices), 8 << 20) for d in self._datasets)
        return block_reader(paths, indices, limit, cache)

    @functools.cached_property
    def _first_ids(self) -> list[int]:
        return np.cumsum([0, *(d.records for d in self._datasets)]).tolist()

    def order(self, shuffling: Shuffling, epoch: int) -> Order:
        """Returns the order of an epoch."""
        return Mixed(
            self._groups(shuffling),
            self._ratios,
            self._length,
            shuffling.seed or 0,
            epoch if shuffling.reshuffle else 0,
        )

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one pipeline's data set, with one shuffling)
    def _groups(self, shuffling: Shuffling) -> list[Group]:
        return [
            LayoutGroup(dataset.layout, first, number, shuffling)
            for number, (dataset, first) in enumerate(
                zip(self._datasets, self._first_ids[:-1], strict=True)
            )
        ]


def digest_of(*parts: object) -> str:
    """Returns a digest of all parts: 16 hexadecimal digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def normalised(ratios: Sequence[float]) -> list[float]:
    """Returns the ratios scaled to sum to 1.

    Raises:
        ValueError: If there are none, or one is not a positive number.
    """
    values = [float(r) for r in ratios]
    if not values or not all(np.isfinite(r) and r > 0 for r in values):
        raise ValueError(f"`ratios` must be positive numbers. Received: {list(ratios)}.")
    return [r / sum(values) for r in values]
