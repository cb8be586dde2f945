"""Order of the records in an epoch: arithmetic on a seed, without stored state.

The order depends only on the seed and the epoch's number. Shards are permuted and grouped,
`shards_at_once` at a time. The blocks of each group are permuted and laid end to end, and the
records are permuted within each window of that sequence. So the records of a window come from a few
blocks, each read once and whole, and any position of the epoch can be computed directly.

The order does not depend on the number of workers nor, except in `Bucketed`, on the batch size.

Reference:
    Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (SplitMix64). Its
    outputs are the sort keys of permutations. NumPy's own generators may change between versions.
"""

import functools
from typing import NamedTuple, Protocol

import numpy as np

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Purposes of random numbers, as part of their keys: so those of one epoch are independent.
SHARDS, BLOCKS, RECORDS, BATCHES, CHOICES, ROWS, CONVERT = range(1, 8)


def mix(numbers: np.ndarray) -> np.ndarray:
    """Returns a random-looking number for each number: uint64, of the same shape."""
    z = numbers.astype(np.uint64)
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    return z ^ z >> np.uint64(31)


def key_of(*numbers: int) -> int:
    """Returns a 64-bit key derived from integers and their order."""
    key = 0
    for number in numbers:
        key = int(mix(np.array([((key ^ number) + _STEP) & _MASK], np.uint64))[0])
    return key


def random_numbers(count: int, *key: int) -> np.ndarray:
    """Returns `count` random-looking numbers derived from `key`: uint64."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    return mix(steps + np.uint64(key_of(*key)))


def permutation(count: int, *key: int) -> np.ndarray:
    """Returns a permutation of `range(count)` derived from `key`: int64."""
    return np.argsort(random_numbers(count, *key), kind="stable")


class Layout(NamedTuple):
    """Layout of records in blocks and shards, from which orders are computed.

    Attributes:
        block_records: Number of records in each block, in the order of the files: int64,
            `[blocks]`.
        block_shard: Index of the shard of each block, non-decreasing: int64, `[blocks]`.
    """

    block_records: np.ndarray
    block_shard: np.ndarray

    @property
    def records(self) -> int:
        """Number of records. Their ids count from 0, in the order of the files."""
        return int(self.block_records.sum())

    @property
    def first_ids(self) -> np.ndarray:
        """Id of each block's first record: int64, `[blocks]`."""
        return np.cumsum(self.block_records) - self.block_records


class Order(Protocol):
    """Order of the records in an epoch."""

    def ids(self, begin: int, end: int) -> np.ndarray:
        """Returns the ids of the records at positions `begin` to `end` (exclusive): int64."""

    def __len__(self) -> int:
        """Returns the number of positions."""


class Sequential:
    """Order of the files.

    Args:
        layout: Layout of the records.
    """

    def __init__(self, layout: Layout):
        self._length = layout.records

    def __len__(self) -> int:
        return self._length

    def ids(self, begin: int, end: int) -> np.ndarray:
        """Returns the ids of the records at positions `begin` to `end` (exclusive): int64."""
        return np.arange(begin, min(end, self._length), dtype=np.int64)


class Shuffled:
    """Seeded random order of an epoch.

    Args:
        layout: Layout of the records.
        seed: Seed of the order.
        epoch: Number of the epoch.
        window: Number of records that are permuted together: more mix better and need more memory.
        shards_at_once: Number of shards whose blocks are permuted together.
        keep_shards: Whether those shards come from all parts of the files, in each epoch: one from
            each of `shards_at_once` runs of neighbours. Workers get a batch's rows in the order of
            their ids, so each worker then reads about the same run in each epoch, for any number
            of workers.
    """

    def __init__(
        self,
        layout: Layout,
        seed: int,
        epoch: int,
        window: int,
        shards_at_once: int,
        keep_shards: bool = False,
    ):
        self._key = (seed, epoch)
        self._window = window
        self._length = layout.records
        blocks = self._permuted_blocks(layout, shards_at_once, keep_shards)
        counts = layout.block_records[blocks]
        # Position of each block's first record when blocks are laid end to end, and its id.
        self._positions = np.cumsum(counts) - counts
        self._first_ids = layout.first_ids[blocks]
        self._permutation = functools.lru_cache(maxsize=4)(self._make_permutation)

    def _permuted_blocks(
        self, layout: Layout, shards_at_once: int, keep_shards: bool
    ) -> np.ndarray:
        shards = int(layout.block_shard[-1]) + 1 if len(layout.block_shard) else 0
        permuted = permutation(shards, *self._key, SHARDS)
        group_of = np.empty(shards, np.int64)
        if keep_shards:
            run = permuted * min(shards_at_once, shards) // max(1, shards)
            by_run = np.argsort(run, kind="stable")
            group_of[permuted[by_run]] = np.arange(shards) - np.searchsorted(
                run[by_run], run[by_run]
            )
        else:
            group_of[permuted] = np.arange(shards) // shards_at_once
        group = group_of[layout.block_shard]
        return np.lexsort((random_numbers(len(group), *self._key, BLOCKS), group))

    def __len__(self) -> int:
        return self._length

    def _make_permutation(self, window: int) -> np.ndarray:
        size = min(self._window, self._length - window * self._window)
        return permutation(size, *self._key, RECORDS, window)

    def window_permutation(self, window: int) -> np.ndarray:
        """Returns the permutation of a window's records: int64, `[records in the window]`."""
        return self._permutation(window)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the ids of the records at positions in the sequence of blocks: int64."""
        block = np.searchsorted(self._positions, positions, side="right") - 1
        return self._first_ids[block] + positions - self._positions[block]

    def ids(self, begin: int, end: int) -> np.ndarray:
        """Returns the ids of the records at positions `begin` to `end` (exclusive): int64."""
        end = min(end, self._length)
        parts = [np.empty(0, np.int64)]
        while begin < end:
            window = begin // self._window
            first = window * self._window
            stop = min(end, first + self._window)
            permuted = self.window_permutation(window)[begin - first : stop - first]
            parts.append(self.at(first + permuted))
            begin = stop
        return np.concatenate(parts)


class Bucketed(Shuffled):
    """Seeded random order whose batches hold records of similar length.

    Within each window, records are sorted by length and cut into batches, and the batches are
    permuted. So, unlike in `Shuffled`, the batch size affects the order.

    Args:
        lengths: Size of each record in bytes: `[records]`.
        batch_size: Number of rows in a batch; the window is rounded to a multiple of it.
        **order: Arguments of `Shuffled`.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, **order):
        order["window"] = max(batch_size, order["window"] // batch_size * batch_size)
        self._lengths, self._batch = lengths, batch_size
        super().__init__(**order)

    def _make_permutation(self, window: int) -> np.ndarray:
        shuffled = super()._make_permutation(window)
        lengths = self._lengths[self.at(window * self._window + shuffled)]
        by_length = shuffled[np.argsort(lengths, kind="stable")]
        whole = len(by_length) // self._batch * self._batch
        batches = by_length[:whole].reshape(-1, self._batch)
        order = permutation(len(batches), *self._key, BATCHES, window)
        # The rest of the last window is its last batch.
        return np.concatenate([batches[order].ravel(), by_length[whole:]])


def scattered(ordinals: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Returns the positions of ordinals in a permutation of `range(count)`, without building it.

    A Feistel network permutes the numbers with as many bits as `count` needs; a result of `count`
    or more is permuted again.

    Args:
        ordinals: Numbers below `count`: int64.
        count: Size of the permutation.
        *key: Integers from which the permutation is derived.

    Reference:
        Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    half = np.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = random_numbers(4, *key)
    positions = ordinals.astype(np.uint64)
    outside = np.ones(len(positions), bool)
    while outside.any():
        left, right = positions[outside] >> half, positions[outside] & low
        for round_key in keys:
            left, right = right, left ^ mix(right + round_key) & low
        positions[outside] = left << half | right
        outside = positions >= np.uint64(count)
    return positions.astype(np.int64)
