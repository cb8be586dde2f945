"""What a conversion will write, decided before it begins: which rows go to which shard.

The plan follows from the input and the options alone, never from the number of processes: so any
number of them writes the same bytes.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdml.data.order import CONVERT, key_of, mix, scattered
from tfdml.data.sources.source import Chunk, Source
from tfdml.data.writer import shard_name

SHARD_BYTES = 150 << 20
# What one process reads at a time where records are dealt to shards: it holds them in memory.
RANGE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """What a conversion is asked to do.

    Attributes:
        name: The data set's name.
        shards: The number of shards over all splits; by their size if it is None.
        shard_bytes: About how large a shard is.
        compressed: Whether shards are compressed by gzip.
        splits: The parts of the records that splits get; they sum to 1.
        split_key: The feature whose value says which split a record goes to; without it the
            record's number says so. Either way a record stays where it is when the data grow.
        shuffle_seed: The seed of a global shuffle; None keeps the order of the input.
        on_error: "strict" ends at a row that cannot be converted, "skip" writes it down.
        max_errors: How many rows may be skipped.
        allow_nonfinite: Whether NaN and infinity are values.
    """

    name: str = "data"
    shards: int | None = None
    shard_bytes: int = SHARD_BYTES
    compressed: bool = False
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    split_key: str | None = None
    shuffle_seed: int | None = None
    on_error: str = "strict"
    max_errors: int | None = None
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & set('/\\:*?"<>| \n'):
            raise ValueError(f"`name` must be a part of a file's name. Received: {self.name!r}.")
        if self.shards is not None and self.shards < 1 or self.shard_bytes < 1:
            raise ValueError(
                f"`shards` and `shard_bytes` must be positive. Received: shards={self.shards}, "
                f"shard_bytes={self.shard_bytes}."
            )
        ratios = [ratio for _, ratio in self.splits]
        if not ratios or min(ratios) <= 0 or abs(sum(ratios) - 1) > 1e-9:
            raise ValueError(
                f"`splits` must have positive parts that sum to 1. Received: {dict(self.splits)}."
            )
        if len({name for name, _ in self.splits}) < len(ratios):
            raise ValueError(f"`splits` must have names of their own. Received: {self.splits}.")
        if self.on_error not in ("strict", "skip"):
            raise ValueError(f'`on_error` must be "strict" or "skip". Received: {self.on_error!r}.')

    @property
    def deals(self) -> bool:
        """Whether a record's shard is known only when it has been read, or the order changes."""
        return len(self.splits) > 1 or self.shuffle_seed is not None


class Range(NamedTuple):
    """Consecutive rows of the input.

    Attributes:
        begin: The first one.
        end: The one behind the last.
    """

    begin: int
    end: int


class Target(NamedTuple):
    """A shard to write.

    Attributes:
        split: Its split.
        number: Its number in the split.
        count: The shards of the split.
        name: Its name.
    """

    split: str
    number: int
    count: int
    name: str


class Plan:
    """Which rows go where.

    Args:
        source: The input.
        options: What is asked for.

    Attributes:
        rows: The rows of the input.
        bytes: About how many bytes they take.
        targets: The shards.
        ranges: The rows that are read together: of each shard, or where records are dealt to
            shards, of each step of that.

    Raises:
        ValueError: If there are fewer rows than shards, or no such key.
    """

    def __init__(self, source: Source, options: Options):
        self._chunks = source.chunks()
        self._begins = np.cumsum([0, *(chunk.rows for chunk in self._chunks)])
        self.rows, self.bytes = int(self._begins[-1]), sum(c.bytes for c in self._chunks)
        self._options = options
        if not self.rows:
            raise ValueError("An input must have rows. Received: none.")
        if options.split_key is not None and options.split_key not in source.schema:
            raise ValueError(
                f"`split_key` must be a feature, one of {sorted(source.schema)}. Received: "
                f"{options.split_key!r}."
            )
        count = options.shards or max(1, min(round(self.bytes / options.shard_bytes), self.rows))
        if count > self.rows:
            raise ValueError(
                f"`shards` must be at most the number of records. Received: shards={count}, "
                f"{self.rows} records."
            )
        self._counts = {name: max(1, round(ratio * count)) for name, ratio in options.splits}
        self.targets = [
            Target(s, i, n, shard_name(options.name, s, i, n, options.compressed))
            for s, n in self._counts.items()
            for i in range(n)
        ]
        steps = len(self.targets)
        if options.deals:
            steps = max(1, min(self.rows, -(-self.bytes // RANGE_BYTES)))
        self.ranges = [
            Range(i * self.rows // steps, (i + 1) * self.rows // steps) for i in range(steps)
        ]

    def chunks_of(self, rows: Range) -> list[tuple[Chunk, int, int]]:
        """Returns the chunks that rows are in, and which rows of each."""
        first = int(np.searchsorted(self._begins, rows.begin, side="right")) - 1
        found = []
        for chunk, begin in zip(self._chunks[first:], self._begins[first:].tolist(), strict=False):
            if begin >= rows.end:
                break
            if chunk.rows:
                part = (max(rows.begin - begin, 0), min(rows.end - begin, chunk.rows))
                found.append((chunk, *part))
        return found

    def places(self, rows: Range) -> np.ndarray:
        """Returns where the shuffle puts rows: int64, `[rows]`."""
        ordinals = np.arange(rows.begin, rows.end, dtype=np.int64)
        if self._options.shuffle_seed is None:
            return ordinals
        return scattered(ordinals, self.rows, self._options.shuffle_seed, CONVERT)

    def targets_of(
        self, ordinals: np.ndarray, places: np.ndarray, keys: Sequence[Any] | None
    ) -> np.ndarray:
        """Returns the numbers of the targets that records go to: int64, `[records]`.

        Args:
            ordinals: The rows.
            places: Where the shuffle puts them.
            keys: The values of `split_key`; None without one.
        """
        counts = np.array(list(self._counts.values()))
        split = np.zeros(len(ordinals), np.int64)
        if len(counts) > 1:
            hashes = _hashes_of_numbers(ordinals) if keys is None else _hashes_of_keys(keys)
            ratios = [ratio for _, ratio in self._options.splits]
            ends = list(itertools.accumulate(ratios))[:-1]
            split = np.searchsorted(ends, hashes.astype(np.float64) / 2**64, side="right")
        return (np.cumsum(counts) - counts)[split] + places * counts[split] // self.rows


def _hashes_of_keys(keys: Sequence[Any]) -> np.ndarray:
    def digest(key: Any) -> bytes:
        data = key if isinstance(key, bytes) else str(key).encode()
        return hashlib.blake2b(data, digest_size=8).digest()

    return np.frombuffer(b"".join(map(digest, keys)), ">u8")


_SALT = np.uint64(key_of(CONVERT))


def _hashes_of_numbers(numbers: np.ndarray) -> np.ndarray:
    return mix(numbers.astype(np.uint64) ^ _SALT)
