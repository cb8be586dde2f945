"""Caches of blocks that were read: all of them in memory, or on a local disk."""

import hashlib
import os
import secrets
import warnings
from collections.abc import Sequence

from tfdml.data.format.index import ShardIndex
from tfdml.data.read.blocks import BlockReader

MEMORY = "memory"


class DiskCopies:
    """Copies of blocks on a disk, one file each.

    The reader compares each copy with the index's checksum, so a truncated or damaged copy, or one
    of other data, counts as missing. Processes of a machine share a directory.

    Args:
        directory: Directory of the copies; created if missing.
    """

    def __init__(self, directory: str):
        os.makedirs(directory, exist_ok=True)
        self._directory = directory
        self._is_full = False

    def _path(self, shard: str, block: int) -> str:
        folder = hashlib.sha256(shard.encode()).hexdigest()[:16]
        return os.path.join(self._directory, folder, f"{block:06d}")

    def read(self, shard: str, block: int) -> bytes:
        """Returns the copy of a block; empty if there is none."""
        try:
            with open(self._path(shard, block), "rb") as file:
                return file.read()
        except OSError:
            return b""

    def write(self, shard: str, block: int, data: bytes) -> None:
        """Stores a copy of a block. If the disk is full, it warns once and stores no more."""
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
            warnings.warn(
                f"Nothing more is cached in cache={self._directory!r}: {error}.", stacklevel=2
            )


def block_reader(
    shards: Sequence[str], indices: Sequence[ShardIndex], cache_bytes: int, cache: str | None
) -> BlockReader:
    """Returns a reader of shards.

    Args:
        shards: Paths of the shards.
        indices: Indices of the shards.
        cache_bytes: Size of the cache of blocks in memory, in bytes.
        cache: "memory" caches all blocks in memory; another string is a directory of copies.
    """
    if cache == MEMORY:
        cache_bytes = sum(int(i.block_raw.sum()) for i in indices)
    copies = DiskCopies(cache) if cache not in (None, MEMORY) else None
    return BlockReader(shards, indices, cache_bytes, copies)
