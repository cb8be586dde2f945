"""Reading of records by their ids: blocks are read whole and ahead, and cached."""

import collections
import concurrent.futures
import gzip
import threading
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tfdml.data.format import index, storage
from tfdml.data.format.framing import FRAME, HEADER, BadRecord, crc32c, unframe
from tfdml.data.format.index import ShardIndex
from tfdml.data.order import Layout

READERS = 4


class Block(NamedTuple):
    """A block in memory.

    Attributes:
        data: Frames of the block, decompressed.
        slices: Slices of `data` that hold the records.
        bad: Errors of damaged records, by their index in the block.
    """

    data: bytes
    slices: list[slice]
    bad: dict[int, BadRecord]


class Copies(Protocol):
    """Store of copies of blocks, so that they need not be read from distant shards again."""

    def read(self, shard: str, block: int) -> bytes:
        """Returns the copy of a block: empty if there is none, and possibly damaged."""

    def write(self, shard: str, block: int, data: bytes) -> None:
        """Stores a copy of a block."""


class BlockReader:
    """Reads records of shards that have indices.

    Args:
        shards: Paths of the shards.
        indices: Indices of the shards.
        cache_bytes: Size of the cache of blocks in bytes; the least recently used are dropped.
        copies: Store of copies of blocks; None for no copies.
    """

    def __init__(
        self,
        shards: Sequence[str],
        indices: Sequence[ShardIndex],
        cache_bytes: int,
        copies: Copies | None = None,
    ):
        self._copies = copies
        self._shards, self._indices = list(shards), list(indices)
        counts = [len(i.block_records) for i in indices]
        self.layout = make_layout(indices)
        self._first_ids = self.layout.first_ids
        self._first_block = np.cumsum(counts) - counts
        self._offsets = [i.block_offsets for i in indices]
        self._limit = cache_bytes
        self._kept: collections.OrderedDict[int, concurrent.futures.Future] = (
            collections.OrderedDict()
        )
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(READERS, "tfdml-blocks")
        self.blocks_read = 0

    @property
    def record_bytes(self) -> float:
        """Average size of a record with its frame, in bytes."""
        total = sum(int(i.block_raw.sum()) for i in self._indices)
        return total / max(1, self.layout.records)

    def where(self, record: int) -> str:
        """Returns the file, record and offset of a record, for messages."""
        block = int(np.searchsorted(self._first_ids, record, side="right")) - 1
        shard = int(self.layout.block_shard[block])
        local = block - int(self._first_block[shard])
        found = self._indices[shard]
        slot = record - int(self._first_ids[block])
        begins, _ = found.frames_of(local)
        offset = int(self._offsets[shard][local])
        # In a compressed file only the block has an offset.
        offset += 0 if self._shards[shard].endswith(".gz") else int(begins[slot])
        number = int(found.first_records[local]) + slot
        return f"{self._shards[shard]}, record {number}, offset {offset}"

    def ahead(self, ids: np.ndarray) -> None:
        """Starts to read the blocks of records that will be read soon."""
        blocks = np.searchsorted(self._first_ids, ids, side="right") - 1
        self._ask(np.unique(blocks).tolist())

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, dict[int, BadRecord]]:
        """Returns records by their ids.

        A call handles each block that it needs once, so many records cost little more than a few.

        Args:
            ids: Ids of the records: int64, `[rows]`.

        Returns:
            Records as an array of `bytes` objects, `[rows]`, empty where damaged; and the errors of
            damaged records by row.
        """
        by_id = np.argsort(ids, kind="stable")
        ids = ids[by_id]
        blocks = np.searchsorted(self._first_ids, ids, side="right") - 1
        slots = (ids - self._first_ids[blocks]).tolist()
        bounds = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        numbers = blocks[bounds].tolist()
        # All of them are requested before waiting for the first one.
        futures = self._ask(numbers)
        found: list[bytes] = []
        damaged: dict[int, BadRecord] = {}
        for begin, end, number, future in zip(
            bounds, [*bounds[1:], len(ids)], numbers, futures, strict=True
        ):
            data, slices, bad = self._result(number, future)
            found += [data[slices[slot]] for slot in slots[begin:end]]
            if bad:
                for row, slot in enumerate(slots[begin:end], begin):
                    if slot in bad:
                        damaged[int(by_id[row])], found[row] = bad[slot], b""
        records = np.empty(len(ids), object)
        records[by_id] = found
        return records, damaged

    def _result(self, number: int, future: concurrent.futures.Future) -> Block:
        try:
            return future.result()
        except OSError:
            # A block that could not be read now may be requested again.
            with self._lock:
                if self._kept.get(number) is future:
                    del self._kept[number]
                    self._kept_bytes -= self._size(number)
            raise

    def _ask(self, numbers: Iterable[int]) -> list[concurrent.futures.Future]:
        """Returns futures of blocks; starts to read those that are not cached."""
        futures = []
        with self._lock:
            for number in numbers:
                future = self._kept.get(number)
                if future is None:
                    future = self._kept[number] = self._pool.submit(self._load, number)
                    self._kept_bytes += self._size(number)
                    self.blocks_read += 1
                else:
                    self._kept.move_to_end(number)
                futures.append(future)
            while self._kept_bytes > self._limit and len(self._kept) > 1:
                gone, _ = self._kept.popitem(last=False)
                self._kept_bytes -= self._size(gone)
        return futures

    def _size(self, number: int) -> int:
        shard = int(self.layout.block_shard[number])
        return int(self._indices[shard].block_raw[number - int(self._first_block[shard])])

    def _load(self, number: int) -> Block:
        shard = int(self.layout.block_shard[number])
        local = number - int(self._first_block[shard])
        found, path = self._indices[shard], self._shards[shard]
        stored, sound = self._stored(shard, local)
        frames, lengths = found.frames_of(local)
        begins = frames + HEADER
        slices = list(map(slice, begins.tolist(), (begins + lengths).tolist()))
        data = stored
        if path.endswith(".gz"):
            try:
                data = gzip.decompress(stored)
            except (OSError, EOFError, zlib.error) as error:
                # Data after the damage cannot be decompressed.
                reason = BadRecord(f"its block is damaged: {error}")
                return Block(b"", slices, dict.fromkeys(range(len(lengths)), reason))
        return Block(data, slices, {} if sound else _bad_records(data, frames, lengths))

    def _stored(self, shard: int, local: int) -> tuple[bytes, bool]:
        """Returns a block's bytes in the file, and whether their checksum is right."""
        found, path = self._indices[shard], self._shards[shard]
        crc = int(found.block_crc[local])
        if self._copies:
            copy = self._copies.read(path, local)
            if copy and crc32c(copy) == crc:
                return copy, True
        stored = storage.read_range(
            path, int(self._offsets[shard][local]), int(found.block_bytes[local])
        )
        sound = crc32c(stored) == crc
        if self._copies and sound:
            self._copies.write(path, local, stored)
        return stored, sound


def make_layout(indices: Sequence[ShardIndex]) -> Layout:
    """Returns the layout of the records of shards."""
    return Layout(
        np.concatenate([i.block_records.astype(np.int64) for i in indices]),
        np.repeat(np.arange(len(indices)), [len(i.block_records) for i in indices]),
    )


def _bad_records(data: bytes, frames: np.ndarray, lengths: np.ndarray) -> dict[int, BadRecord]:
    """Checks the records of a block one by one; returns the errors of damaged ones."""
    bad = {}
    for slot, (begin, length) in enumerate(zip(frames.tolist(), lengths.tolist(), strict=True)):
        try:
            unframe(data, begin, length)
        except BadRecord as error:
            bad[slot] = error
    return bad


def window_bytes(records: int, indices: Sequence[ShardIndex]) -> int:
    """Returns the approximate size of `records` records in bytes, as blocks."""
    total = sum(int(i.block_raw.sum()) for i in indices)
    count = sum(len(i.lengths) for i in indices)
    return int(records * (total / max(1, count) + FRAME))


def read_indices(shards: Sequence[str]) -> list[ShardIndex]:
    """Reads the indices of shards; builds missing ones by reading the shards."""

    def one(shard: str) -> ShardIndex:
        if storage.exists(shard + index.SUFFIX):
            return index.read(shard)
        return index.build(shard)

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(one, shards))
