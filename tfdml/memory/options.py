"""Options of a strategy that an estimate depends on."""

import dataclasses
import math

import tensorflow as tf

from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.compression import Compressor
from tfdml.local_updates import LocalUpdates
from tfdml.strategies.replica_strategy import ReplicaStrategy
from tfdml.strategies.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """How ranks share batches and exchange gradients.

    Attributes:
        compressor: Compressor of exchanged gradients, None for none.
        bucket_bytes: Size of a bucket of gradients.
        weights: Parts of a batch by replica, None for equal parts.
        accumulates: Whether accumulated gradients are kept besides Keras's own.
        min_embedding_bytes: Bytes of an embedding table from which on it may be divided.
        row_codec: Name of the encoding of rows of divided tables between ranks.
        local_updates: Method of local updates, None for synchronous steps.
    """

    compressor: Compressor | None = None
    bucket_bytes: int = BUCKET_BYTES
    weights: tuple[int, ...] | None = None
    accumulates: bool = False
    min_embedding_bytes: int = Sharding().min_embedding_bytes
    row_codec: str | None = None
    local_updates: LocalUpdates | None = None

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "ExchangeOptions":
        """Returns a strategy's options.

        Raises:
            ValueError: If variables are on parameter servers, or models in stages.
        """
        if not isinstance(strategy, tf.distribute.Strategy) or isinstance(
            strategy, tf.distribute.experimental.ParameterServerStrategy
        ):
            raise ValueError(
                f"`strategy` must be a synchronous strategy, whose ranks hold the whole model. "
                f"Received: strategy={strategy!r}. Parameter servers share weights and slots; "
                f"estimate a worker with the default strategy."
            )
        if not isinstance(strategy, ReplicaStrategy):
            return cls()
        options = strategy.extended.options
        if options.pipeline is not None:
            raise ValueError(
                f"`strategy` must not have a `pipeline`, because no device holds the whole model. "
                f"Received: pipeline={options.pipeline!r}. Its `plan(model, batch_size)` lists the "
                f"bytes of each stage."
            )
        sharding = options.sharding or Sharding()
        return cls(
            options.compression,
            options.bucket_bytes,
            strategy.batch_weights,
            True,
            sharding.min_embedding_bytes,
            sharding.row_codec,
            options.local_updates,
        )

    def most_rows(self, batch_size: int, ranks: int) -> int:
        """Returns the most rows that a rank gets of a batch."""
        if self.weights is not None and len(self.weights) == ranks:
            return math.ceil(batch_size * max(self.weights) / sum(self.weights))
        return math.ceil(batch_size / ranks)
