"""How a pipeline reads records: the arguments of `read_tfrecords`, checked and put together."""

import dataclasses
from collections.abc import Callable

from tfdml.data.dataset import Shuffling
from tfdml.data.parsing import ImageDecoding
from tfdml.data.sharding import Batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How records become batches; `read_tfrecords` documents the fields that are its arguments.

    Attributes:
        features: The features that are read, with the label.
        label: The feature that is the target, if one is.
        batches: How an epoch is cut into global batches.
        shuffling: How an epoch is ordered.
        images: How images are decoded.
        transform: A function of whole batches.
        augment: A function of whole batches and their seeds.
        on_corrupt: "error" or "skip".
        ledger: The directory of the workers' notes, if they take notes.
        cache: "memory" or a directory, if what is read is kept.
    """

    features: list[str]
    label: str | None
    batches: Batches
    shuffling: Shuffling
    images: ImageDecoding
    transform: Callable | None
    augment: Callable | None
    on_corrupt: str
    ledger: str | None
    cache: str | None

    @property
    def skips_corrupt(self) -> bool:
        """Whether damaged records are skipped; else they are errors."""
        return self.on_corrupt == "skip"

    @property
    def weighted(self) -> bool:
        """Whether batches have weights, for rows that do not count."""
        return self.batches.end == "pad" or self.skips_corrupt
