"""Plan of a conversion, made before it begins: which rows go to which shard.

The plan depends only on the input and the options, never on the number of processes: so any number
of them writes the same bytes.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdml.data.format.shard_writer import shard_name
from tfdml.data.order import CONVERT, key_of, mix, scattered
from tfdml.data.sources.source import Chunk, Source

SHARD_BYTES = 150 << 20
# Input that one process reads, and holds in memory, at a time if records are dealt to shards.
RANGE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion.

    Attributes:
        name: Name of the data set.
        shards: Number of shards over all splits; None derives it from `shard_bytes`.
        shard_bytes: Approximate size of a shard in bytes.
        compressed: Whether shards are compressed by gzip.
        splits: Name and share of each split; the shares sum to 1.
        split_key: Feature whose value determines the split of a record; by default the record's
            number does. Either way a record keeps its split when the data grow.
        shuffle_seed: Seed of a global shuffle; None keeps the order of the input.
        on_error: "strict" ends at a row that cannot be converted, "skip" notes it and continues.
        max_errors: Maximum number of rows that may be skipped; None for no limit.
        allow_nonfinite: Whether NaN and infinity are allowed.
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
            raise ValueError(f"`name` must be usable in a file name. Received: {self.name!r}.")
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
            raise ValueError(f"`splits` must have unique names. Received: {self.splits}.")
        if self.on_error not in ("strict", "skip"):
            raise ValueError(f'`on_error` must be "strict" or "skip". Received: {self.on_error!r}.')

    @property
    def needs_shuffle(self) -> bool:
        """Whether a record's shard depends on its content, or the order of records changes."""
        return len(self.splits) > 1 or self.shuffle_seed is not None


class Range(NamedTuple):
    """Range of consecutive rows of the input.

    Attributes:
        begin: First row.
        end: End of the rows, exclusive.
    """

    begin: int
    end: int


class Target(NamedTuple):
    """A shard to write.

    Attributes:
        split: Name of its split.
        number: Index of the shard in its split.
        count: Number of shards in the split.
        name: Name of its file.
    """

    split: str
    number: int
    count: int
    name: str


class ConversionPlan:
    """Assignment of rows to shards.

    Args:
        source: Input to convert.
        options: Options of the conversion.

    Attributes:
        rows: Number of rows in the input.
        bytes: Approximate size of the rows in bytes.
        targets: Shards to write.
        ranges: Rows that are read together: those of each shard or, if records are dealt to shards,
            those of each dealing step.

    Raises:
        ValueError: If there are no rows, or fewer than shards, or `split_key` is not a feature.
    """

    def __init__(self, source: Source, options: ConversionOptions):
        self._chunks = source.chunks()
        self._begins = np.cumsum([0, *(chunk.rows for chunk in self._chunks)])
        self.rows, self.bytes = int(self._begins[-1]), sum(c.bytes for c in self._chunks)
        self._options = options
        if not self.rows:
            raise ValueError(f"An input must have rows. Received: none in {source.files[:3]}.")
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
        if options.needs_shuffle:
            steps = max(1, min(self.rows, -(-self.bytes // RANGE_BYTES)))
        self.ranges = [
            Range(i * self.rows // steps, (i + 1) * self.rows // steps) for i in range(steps)
        ]

    def chunks_of(self, rows: Range) -> list[tuple[Chunk, int, int]]:
        """Returns the chunks that hold a range, each with the begin and end of its rows."""
        first = int(np.searchsorted(self._begins, rows.begin, side="right")) - 1
        found = []
        for chunk, begin in zip(self._chunks[first:], self._begins[first:].tolist(), strict=False):
            if begin >= rows.end:
                break
            if chunk.rows:
                part = (max(rows.begin - begin, 0), min(rows.end - begin, chunk.rows))
                found.append((chunk, *part))
        return found

    def positions(self, rows: Range) -> np.ndarray:
        """Returns the positions of rows after the shuffle: int64, `[rows]`."""
        ordinals = np.arange(rows.begin, rows.end, dtype=np.int64)
        if self._options.shuffle_seed is None:
            return ordinals
        return scattered(ordinals, self.rows, self._options.shuffle_seed, CONVERT)

    def targets_of(
        self, ordinals: np.ndarray, positions: np.ndarray, keys: Sequence[Any] | None
    ) -> np.ndarray:
        """Returns the index of the target of each record: int64, `[records]`.

        Args:
            ordinals: Row numbers of the records.
            positions: Positions of the records after the shuffle.
            keys: Values of `split_key`; None without one.
        """
        counts = np.array(list(self._counts.values()))
        split = np.zeros(len(ordinals), np.int64)
        if len(counts) > 1:
            hashes = _hashes_of_numbers(ordinals) if keys is None else _hashes_of_keys(keys)
            ratios = [ratio for _, ratio in self._options.splits]
            ends = list(itertools.accumulate(ratios))[:-1]
            split = np.searchsorted(ends, hashes.astype(np.float64) / 2**64, side="right")
        return (np.cumsum(counts) - counts)[split] + positions * counts[split] // self.rows


def _hashes_of_keys(keys: Sequence[Any]) -> np.ndarray:
    def digest(key: Any) -> bytes:
        data = key if isinstance(key, bytes) else str(key).encode()
        return hashlib.blake2b(data, digest_size=8).digest()

    return np.frombuffer(b"".join(map(digest, keys)), ">u8")


_SALT = np.uint64(key_of(CONVERT))


def _hashes_of_numbers(numbers: np.ndarray) -> np.ndarray:
    return mix(numbers.astype(np.uint64) ^ _SALT)
