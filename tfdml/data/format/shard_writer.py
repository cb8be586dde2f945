"""Writing of one shard: records in blocks, its index beside it, and its entry in the manifest."""

import gzip
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from tfdml.data.format import storage
from tfdml.data.format.framing import FRAME, Frames
from tfdml.data.format.index import BLOCK_BYTES, SUFFIX, IndexBuilder
from tfdml.data.format.manifest import Shard

GZIP_LEVEL = 6


class ShardWriter:
    """Appends records to an open file.

    Args:
        file: File opened for writing bytes.
        compressed: Whether blocks are gzip members.
    """

    def __init__(self, file, compressed: bool):
        self._file = file
        self._compressed = compressed
        self._digest = hashlib.sha256()
        self._index = IndexBuilder()
        self._frames: list[bytes] = []
        self._lengths: list[int] = []
        self._raw = 0
        self.records = self.bytes = 0

    def write(self, frames: Frames) -> None:
        """Appends records; a block ends with the record that fills it."""
        ends = np.cumsum(frames.lengths + FRAME)
        first = begin = 0
        while first < len(ends):
            # Just after the record that fills the block.
            last = int(np.searchsorted(ends, begin + BLOCK_BYTES - self._raw)) + 1
            last = min(last, len(ends))
            end = int(ends[last - 1])
            self._frames.append(frames.data[begin:end])
            self._lengths += frames.lengths[first:last].tolist()
            self._raw += end - begin
            if self._raw >= BLOCK_BYTES:
                self._close_block()
            first, begin = last, end

    def _close_block(self) -> None:
        data = b"".join(self._frames)
        if self._compressed:
            # Without a timestamp: equal records give equal bytes.
            data = gzip.compress(data, GZIP_LEVEL, mtime=0)
        self._file.write(data)
        self._digest.update(data)
        self._index.add_block(self._lengths, data, self._raw)
        self.records += len(self._lengths)
        self.bytes += len(data)
        self._frames, self._lengths, self._raw = [], [], 0

    def finish(self) -> tuple[str, bytes]:
        """Writes the last block; returns the file's digest and its index."""
        if self._lengths:
            self._close_block()
        return self._digest.hexdigest(), self._index.build().to_bytes()


class OpenShard:
    """A shard that is being written.

    Attributes:
        writer: Writer that appends records.
        shard: Manifest entry of the shard, once it is closed.
    """

    def __init__(self, writer: ShardWriter):
        self.writer = writer
        self.shard: Shard | None = None


@contextmanager
def open_shard(directory: str, name: str) -> Iterator[OpenShard]:
    """Context manager: opens a shard that appears whole, after its index, on exit.

    Args:
        directory: Directory of the shard.
        name: Name of the shard; if it ends in `.gz`, the shard is compressed.
    """
    path = storage.join(directory, name)
    with storage.writing(path) as file:
        opened = OpenShard(ShardWriter(file, name.endswith(".gz")))
        yield opened
        digest, index = opened.writer.finish()
        storage.write_bytes(path + SUFFIX, index)
        opened.shard = Shard(
            name,
            opened.writer.records,
            opened.writer.bytes,
            digest,
            hashlib.sha256(index).hexdigest(),
        )


def write_shard(directory: str, name: str, parts: Iterable[Frames]) -> Shard:
    """Writes a shard of framed records; returns its manifest entry."""
    with open_shard(directory, name) as opened:
        for frames in parts:
            opened.writer.write(frames)
    return opened.shard


def shard_name(name: str, split: str, number: int, count: int, compressed: bool) -> str:
    """Returns the name of a shard, such as `mnist-train-00000-of-00032.tfrecord`."""
    return f"{name}-{split}-{number:05d}-of-{count:05d}.tfrecord{'.gz' if compressed else ''}"
