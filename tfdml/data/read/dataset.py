"""Input of a pipeline: the shards of a split, their blocks, and the orders of its epochs."""

import dataclasses
import hashlib

import numpy as np

from tfdml.data.format import manifest as manifests
from tfdml.data.format import storage
from tfdml.data.format.manifest import DatasetManifest
from tfdml.data.order import Bucketed, Order, Sequential, Shuffled
from tfdml.data.read.blocks import BlockReader, make_layout, read_indices, window_bytes
from tfdml.data.read.caching import block_reader

WINDOW_BYTES = 64 << 20
LEAST_WINDOW = 1024
SHARDS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Shuffling:
    """Options for the order of an epoch.

    Attributes:
        seed: Seed of the order; None keeps the order of the files.
        window: Number of records that are permuted together.
        shards_at_once: Number of shards whose blocks are permuted together.
        reshuffle: Whether each epoch has its own order.
        bucket: Batch size for batches of records of similar length; 0 for no bucketing.
        keep_shards: Whether a worker reads about the same shards in each epoch.
    """

    seed: int | None
    window: int
    shards_at_once: int = SHARDS_AT_ONCE
    reshuffle: bool = True
    bucket: int = 0
    keep_shards: bool = False


class RecordDataset:
    """Records of one split of a data set.

    Args:
        path: Path of the manifest, or of the directory that holds it.
        split: Name of the split; optional if there is only one.

    Raises:
        ValueError: If the split does not exist or is empty, or one of its files is missing or
            differs in size from the manifest.

    Attributes:
        manifest: Manifest of the data set.
        shards: Shards of the split, without empty ones.
        paths: Paths of the shards.
        indices: Indices of the shards.
        layout: Layout of the records in the shards.
    """

    def __init__(self, path: str, split: str | None = None):
        self.manifest: DatasetManifest = manifests.load(path)
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
        self.layout = make_layout(self.indices)

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(s.records for s in self.shards)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal for two data sets only if all their shards are."""
        return hashlib.sha256("".join(s.sha256 for s in self.shards).encode()).hexdigest()[:16]

    def default_window(self) -> int:
        """Returns the number of records that fill `WINDOW_BYTES`, at least `LEAST_WINDOW`."""
        mean = window_bytes(self.records, self.indices) / self.records
        return max(LEAST_WINDOW, int(WINDOW_BYTES / mean))

    def reader(self, window: int, cache: str | None = None) -> BlockReader:
        """Returns a reader that caches the blocks of two windows of records; see `caching`."""
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
