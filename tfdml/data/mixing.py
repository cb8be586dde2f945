"""Sampling at fixed ratios: several data sets mixed.

An epoch's places are cut into cycles. Each cycle holds of every group exactly its part, in an
order of its own; the k-th place of a group is the k-th record of that group's own order, which
begins anew when it has been used up. So it is arithmetic too: any place of any epoch can be asked
for at once, and a group that is used in part goes on in the next epoch where it was.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tfdml.data.blocks import BlockReader, window_bytes
from tfdml.data.caching import block_reader
from tfdml.data.dataset import RecordDataset, Shuffling
from tfdml.data.manifest import Manifest
from tfdml.data.order import CHOICES, Layout, Order, Sequential, Shuffled, permutation

# The places of a cycle: ratios are exact to one in as many.
CYCLE = 10_000


class Group(Protocol):
    """Records that are drawn from."""

    def order(self, number: int) -> Order:
        """Returns the order in which they are drawn for the `number`-th time."""

    def __len__(self) -> int:
        """Returns the number of records."""


class Mixed:
    """An epoch that draws from groups at fixed ratios.

    Args:
        groups: The groups.
        ratios: Their parts; they sum to 1.
        length: The places of an epoch.
        seed: What the order of a cycle follows from.
        epoch: The epoch.
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
        """Returns the ids of the records at places `begin` to before `end`: int64."""
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
        """Returns the ids of a cycle's places."""
        size = min(CYCLE, self._length - cycle * CYCLE)
        counts = self._counts if size == CYCLE else counts_of(self._ratios, size)
        group_of = np.repeat(np.arange(len(counts)), counts)
        group_of = group_of[permutation(size, *self._key, CHOICES, cycle)]
        ids = np.empty(size, np.int64)
        for number, (group, count) in enumerate(zip(self._groups, counts.tolist(), strict=True)):
            first = int(self._first[number] + cycle * self._counts[number])
            ids[group_of == number] = _draw(group, first, count)
        return ids


def counts_of(ratios: Sequence[float], places: int) -> np.ndarray:
    """Returns how many of `places` each ratio gets, by the largest remainders: int64."""
    exact = np.asarray(ratios, np.float64) * places
    counts = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: places - int(counts.sum())]] += 1
    return counts


def _draw(group: Group, first: int, count: int) -> np.ndarray:
    """Returns the ids of draws `first` to before `first + count` of a group."""
    parts = [np.empty(0, np.int64)]
    while count:
        number, place = divmod(first, len(group))
        taken = min(count, len(group) - place)
        parts.append(group.order(number).ids(place, place + taken))
        first, count = first + taken, count - taken
    return np.concatenate(parts)


class LayoutGroup:
    """All records of a data set, in an order of the usual kind.

    Args:
        layout: How they lie.
        first_id: The id of the first of them.
        key: What tells this group's orders from others': a number.
        shuffling: How they are ordered.
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
        return _Moved(order, self._first_id)


class _Moved:
    """An order whose ids begin elsewhere."""

    def __init__(self, order: Order, first_id: int):
        self._order, self._first_id = order, first_id

    def __len__(self) -> int:
        return len(self._order)

    def ids(self, begin: int, end: int) -> np.ndarray:
        return self._order.ids(begin, end) + self._first_id


class MixedDataset:
    """Several data sets, drawn from at fixed ratios.

    Args:
        datasets: The data sets.
        ratios: Their parts of an epoch, of any sum; None for parts by their records.
        length: The places of an epoch; None for the records of all of them.

    Raises:
        ValueError: If the ratios do not fit.
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
    def manifest(self) -> Manifest:
        """The first one's: what is wanted of it, all have alike."""
        return self._datasets[0].manifest

    @property
    def digest(self) -> str:
        """What two mixtures have alike only if they draw the same from the same data."""
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
        """Returns a window for each, so that all together stay in the usual memory."""
        return max(1, min(d.default_window() for d in self._datasets) // len(self._datasets))

    def reader(self, window: int, cache: str | None = None) -> BlockReader:
        """Returns a reader of all, that keeps the blocks of two windows of each."""
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
    """Returns what follows from all of these: 16 hexadecimal digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def normalised(ratios: Sequence[float]) -> list[float]:
    """Returns ratios that sum to 1.

    Raises:
        ValueError: If one is not a positive number.
    """
    values = [float(r) for r in ratios]
    if not values or not all(np.isfinite(r) and r > 0 for r in values):
        raise ValueError(f"`ratios` must be positive numbers. Received: {list(ratios)}.")
    return [r / sum(values) for r in values]
