"""Options for reading records: the arguments of `read_tfrecords`, checked."""

import dataclasses
from collections.abc import Callable

from tfdml.data.read.dataset import Shuffling
from tfdml.data.read.parsing import ImageDecoding
from tfdml.data.read.sharding import Batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for making batches of records; most are arguments of `read_tfrecords`, see there.

    Attributes:
        features: Features that are read, including the label.
        label: Feature that is the target; None for no target.
        batches: Division of an epoch into global batches.
        shuffling: Options for the order of an epoch.
        images: Options for decoding images.
        transform: Function of whole batches.
        augment: Function of whole batches and their seeds.
        on_corrupt: "error" or "skip".
        ledger: Directory of the workers' ledger files; None for no ledger.
        cache: "memory" or a directory in which blocks are cached; None for neither.
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
        """Whether damaged records are skipped; else they raise errors."""
        return self.on_corrupt == "skip"

    @property
    def weighted(self) -> bool:
        """Whether batches have weights, for rows that do not count."""
        return self.batches.end == "pad" or self.skips_corrupt
