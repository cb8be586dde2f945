"""What a pipeline reads from: the shards of a split, their blocks, and the orders of its epochs."""

import dataclasses
import hashlib

import numpy as np

from tfdml.data import manifest as manifests
from tfdml.data import storage
from tfdml.data.blocks import BlockReader, layout_of, read_indices, window_bytes
from tfdml.data.caching import block_reader
from tfdml.data.manifest import Manifest
from tfdml.data.order import Bucketed, Order, Sequential, Shuffled

WINDOW_BYTES = 64 << 20
LEAST_WINDOW = 1024
SHARDS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Shuffling:
    """How an epoch is ordered.

    Attributes:
        seed: What the order follows from; None keeps the order of the files.
        window: The records that are permuted together.
        shards_at_once: The shards whose blocks are permuted together.
        reshuffle: Whether each epoch has an order of its own.
        bucket: The batch size for batches of similar length; 0 for none.
        keep_shards: Whether a worker reads about the same shards in each epoch.
    """

    seed: int | None
    window: int
    shards_at_once: int = SHARDS_AT_ONCE
    reshuffle: bool = True
    bucket: int = 0
    keep_shards: bool = False


class RecordDataset:
    """The records of a split.

    Args:
        path: The manifest, or the directory that it is in.
        split: The split; may be left out where there is only one.

    Raises:
        ValueError: If there is no such split, it is empty, or a file of it is missing or of
            another size than the manifest says.

    Attributes:
        manifest: What is said of the data set.
        shards: The split's shards that have records.
        paths: Where they are.
        indices: Their indices.
        layout: How the records lie in them.
    """

    def __init__(self, path: str, split: str | None = None):
        self.manifest: Manifest = manifests.load(path)
        self.shards = [s for s in self.manifest.shards(split) if s.records]
        if not self.shards:
            raise ValueError(f"`split` must have records. Received: {split!r} of {path}, with 0.")
        paths = [self.manifest.path_of(s) for s in self.shards]
        self.indices = read_indices(paths)
        for path, shard, found in zip(paths, self.shards, self.indices, strict=True):
            stored = storage.size(path) if storage.is_local(path) else shard.bytes
            if stored != shard.bytes:
                raise ValueError(
                    f"{path} must have {shard.bytes} bytes, as the manifest says. Received: "
                    f"{stored}. Run `tfdml records verify`."
                )
            stored = int(found.block_bytes.sum())
            if len(found.lengths) != shard.records or stored != shard.bytes:
                raise ValueError(
                    f"The index of {path} must be that of the shard, with {shard.records} records "
                    f"in {shard.bytes} bytes. Received: {len(found.lengths)} in {stored}. Run "
                    f"`tfdml records verify`."
                )
        self.paths = paths
        self.layout = layout_of(self.indices)

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(s.records for s in self.shards)

    @property
    def digest(self) -> str:
        """What two data sets have alike only if all their shards are: 16 hexadecimal digits."""
        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()[:16]

    def default_window(self) -> int:
        """Returns the records that `WINDOW_BYTES` hold, and not too few of large ones."""
        mean = window_bytes(self.records, self.indices) / self.records
        return max(LEAST_WINDOW, int(WINDOW_BYTES / mean))

    def reader(self, window: int, cache: str | None = None) -> BlockReader:
        """Returns a reader that keeps the blocks of two windows of records; see `caching`."""
        limit = max(2 * window_bytes(window, self.indices), 8 << 20)
        return block_reader(self.paths, self.indices, limit, cache)

    def order(self, shuffling: Shuffling, epoch: int) -> Order:
        """Returns the order of an epoch."""
        if shuffling.seed is None:
            return Sequential(self.layout)
        options = {
            "layout": self.layout,
            "seed": shuffling.seed,
            "epoch": epoch if shuffling.reshuffle else 0,
            "window": shuffling.window,
            "shards_at_once": shuffling.shards_at_once,
            "keep_shards": shuffling.keep_shards,
        }
        if shuffling.bucket:
            lengths = np.concatenate([i.lengths for i in self.indices])
            return Bucketed(lengths, shuffling.bucket, **options)
        return Shuffled(**options)
