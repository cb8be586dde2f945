"""Index of a shard in a sidecar file: positions of its records, and checksums of blocks of them.

A block is a run of consecutive records that are read at once: their frames take about
`BLOCK_BYTES`. In a compressed shard each block is a gzip member of its own, so it can be read alone
there too. One checksum of a block's bytes shows that all its records are sound; only if it is wrong
are the records checked one by one.

The file is `NAME.tfrecord.index`, little-endian: `TFDMLIX1`; the numbers of records and blocks
(uint64); the records' lengths (uint32 each); four arrays with an entry for each block: its number
of records, its bytes in the file, its bytes when decompressed (uint64) and the CRC-32C of its bytes
in the file (uint32); at the end the CRC-32C of all that.
"""

import gzip
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdml.data.format import storage
from tfdml.data.format.framing import FRAME, crc32c, scan

BLOCK_BYTES = 1 << 18
SUFFIX = ".index"
_MAGIC = b"TFDMLIX1"


class ShardIndex(NamedTuple):
    """Positions of the records and blocks of one shard.

    Attributes:
        lengths: Size of each record in bytes, without its frame: uint32, shape `[records]`.
        block_records: Number of records in each block: uint64, shape `[blocks]`.
        block_bytes: Size of each block in the file, in bytes: uint64, shape `[blocks]`.
        block_raw: Size of each block when decompressed, in bytes: uint64, shape `[blocks]`.
        block_crc: CRC-32C of each block's bytes in the file: uint32, shape `[blocks]`.
    """

    lengths: np.ndarray
    block_records: np.ndarray
    block_bytes: np.ndarray
    block_raw: np.ndarray
    block_crc: np.ndarray

    @property
    def block_offsets(self) -> np.ndarray:
        """Offset of each block in the file: int64, shape `[blocks]`."""
        return np.cumsum(self.block_bytes.astype(np.int64)) - self.block_bytes.astype(np.int64)

    @property
    def first_records(self) -> np.ndarray:
        """Index of each block's first record: int64, shape `[blocks]`."""
        return np.cumsum(self.block_records.astype(np.int64)) - self.block_records.astype(np.int64)

    def frames_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offsets of a block's frames within it, and its records' sizes in bytes."""
        first = int(self.first_records[block])
        lengths = self.lengths[first : first + int(self.block_records[block])].astype(np.int64)
        return np.cumsum(lengths + FRAME) - (lengths + FRAME), lengths

    def to_bytes(self) -> bytes:
        """Returns the content of the sidecar file."""
        counts = np.array([len(self.lengths), len(self.block_crc)], "<u8")
        body = b"".join(
            (
                _MAGIC,
                counts.tobytes(),
                self.lengths.astype("<u4").tobytes(),
                self.block_records.astype("<u8").tobytes(),
                self.block_bytes.astype("<u8").tobytes(),
                self.block_raw.astype("<u8").tobytes(),
                self.block_crc.astype("<u4").tobytes(),
            )
        )
        return body + np.array([crc32c(body)], "<u4").tobytes()


def from_bytes(data: bytes, name: str) -> ShardIndex:
    """Parses the content of a sidecar file.

    Raises:
        ValueError: If it is damaged.
    """
    damaged = (
        f"The index {name} must be undamaged. Received: {{}}. Run `tfdml records verify --repair`."
    )
    if len(data) < 28 or data[:8] != _MAGIC:
        raise ValueError(
            damaged.format(f"{len(data)} bytes that do not begin with an index header")
        )
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError(damaged.format("a wrong checksum"))
    records, blocks = np.frombuffer(data, "<u8", 2, 8).tolist()
    arrays, offset = [], 24
    for dtype, count in (("<u4", records), *(("<u8", blocks),) * 3, ("<u4", blocks)):
        arrays.append(np.frombuffer(data, dtype, count, offset))
        offset += arrays[-1].nbytes
    return ShardIndex(*arrays)


def read(shard: str) -> ShardIndex:
    """Reads the index of a shard.

    Args:
        shard: Path of the shard.

    Raises:
        ValueError: If the index is damaged.
        FileNotFoundError: If there is no index.
    """
    return from_bytes(storage.read_bytes(shard + SUFFIX), shard + SUFFIX)


class IndexBuilder:
    """Builds an index block by block, while a shard is written or scanned."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._blocks: list[tuple[int, int, int, int]] = []

    def add_block(self, lengths: Sequence[int], stored: bytes, raw: int) -> None:
        """Adds a block: its records' lengths, its bytes in the file, and its decompressed size."""
        self._lengths += lengths
        self._blocks.append((len(lengths), len(stored), raw, crc32c(stored)))

    def build(self) -> ShardIndex:
        """Returns the index."""
        columns = list(zip(*self._blocks, strict=True)) or [()] * 4
        records, stored, raw, crc = (np.array(c, np.uint64) for c in columns)
        return ShardIndex(
            np.array(self._lengths, np.uint32), records, stored, raw, crc.astype(np.uint32)
        )


def build(shard: str) -> ShardIndex:
    """Builds the index of a shard that has none, by reading it; a gzip file is one block.

    Raises:
        BadRecord: At the first damaged record.
    """
    builder = IndexBuilder()
    if shard.endswith(".gz"):
        stored = storage.read_bytes(shard)
        with storage.open_read(shard) as file, gzip.open(file) as stream:
            lengths = [len(f.record) for f in scan(stream, shard)]
        if lengths:
            builder.add_block(lengths, stored, sum(lengths) + FRAME * len(lengths))
        return builder.build()
    with storage.open_read(shard) as stream:
        lengths, begin, end = [], 0, 0
        for offset, record in scan(stream, shard):
            lengths.append(len(record))
            end = offset + FRAME + len(record)
            if end - begin >= BLOCK_BYTES:
                builder.add_block(
                    lengths, storage.read_range(shard, begin, end - begin), end - begin
                )
                lengths, begin = [], end
        if lengths:
            builder.add_block(lengths, storage.read_range(shard, begin, end - begin), end - begin)
    return builder.build()
