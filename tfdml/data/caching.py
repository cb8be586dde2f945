"""What is read once is kept: all blocks in memory, or on a disk of this machine."""

import hashlib
import os
import secrets
import warnings
from collections.abc import Sequence

from tfdml.data.blocks import BlockReader
from tfdml.data.index import ShardIndex

MEMORY = "memory"


class DiskCopies:
    """Copies of blocks, each in a file of its own.

    Whoever reads one compares it with the index's checksum, so one that is cut, damaged or of
    other data counts as missing. Processes of a machine share a directory.

    Args:
        directory: Where they are; made if need be.
    """

    def __init__(self, directory: str):
        os.makedirs(directory, exist_ok=True)
        self._directory = directory
        self._is_full = False

    def _path(self, shard: str, block: int) -> str:
        folder = hashlib.sha256(shard.encode()).hexdigest()[:16]
        return os.path.join(self._directory, folder, f"{block:06d}")

    def read(self, shard: str, block: int) -> bytes:
        """Returns the copy of a block; nothing, if there is none."""
        try:
            with open(self._path(shard, block), "rb") as file:
                return file.read()
        except OSError:
            return b""

    def write(self, shard: str, block: int, data: bytes) -> None:
        """Keeps a block; a disk that is full is said once, and no reason to end."""
        if self._is_full:
            return
        path = self._path(shard, block)
        partial = f"{path}.{secrets.token_hex(4)}"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(partial, "wb") as file:
                file.write(data)
            os.replace(partial, path)
        except OSError as error:
            self._is_full = True
            warnings.warn(f"No more is kept in cache={self._directory!r}: {error}.", stacklevel=2)


def block_reader(
    shards: Sequence[str], indices: Sequence[ShardIndex], cache_bytes: int, cache: str | None
) -> BlockReader:
    """Returns a reader of shards.

    Args:
        shards: Their paths.
        indices: Their indices.
        cache_bytes: How many bytes of blocks are kept in memory.
        cache: "memory" keeps all of them there; else a directory where copies are kept.
    """
    if cache == MEMORY:
        cache_bytes = sum(int(i.block_raw.sum()) for i in indices)
    copies = DiskCopies(cache) if cache not in (None, MEMORY) else None
    return BlockReader(shards, indices, cache_bytes, copies)
