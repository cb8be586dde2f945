"""Bytes that a rank sends for an optimizer's gradients in a step, with and without compression."""

import tensorflow as tf

from tfdml.collectives.aggregator import GradientAggregator, StepGradients
from tfdml.collectives.hosts import Hosts
from tfdml.compression.auto.auto_aggregator import AutoAggregator
from tfdml.compression.auto.cost_model import ranks_of_a_host, traffic
from tfdml.compression.compressor import Compressor
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator

_INDEX_BYTES = 8


class SentBytes:
    """Bytes that a rank sends for gradients, by the cost model's arithmetic; not measured.

    Lookups in tables that are dealt to the ranks, and the small messages that carry metrics and
    counts, are left out.

    Args:
        size: The number of ranks.
        compressor: Compressor of the gradients; None for no compression.
        bucket_bytes: Bytes of gradients that are exchanged together.
        hosts: Hosts and their ranks; None if that does not matter.
        to_owners: Whether each gradient is summed only where it is owned.
    """

    def __init__(
        self,
        size: int,
        compressor: Compressor | None,
        bucket_bytes: int,
        hosts: Hosts | None = None,
        to_owners: bool = False,
    ):
        self._size, self._compressor = size, compressor
        self._bucket_bytes, self._hosts, self._to_owners = bucket_bytes, hosts, to_owners

    def of_step(
        self, aggregator: GradientAggregator, gradients: StepGradients
    ) -> tuple[tf.Tensor | float, tf.Tensor | float]:
        """Returns the bytes that are sent, and those that would be sent without compression.

        Args:
            aggregator: The optimizer's aggregator, which has summed these gradients.
            gradients: This process's gradients.
        """
        if self._size == 1:
            return 0.0, 0.0
        rows = self._rows(gradients)
        plain = self._dense(gradients, None, by_hosts=False)
        if isinstance(aggregator, AutoAggregator):
            candidates = [self._by(part, c, gradients) for part, c in aggregator.candidates]
            dense = aggregator.of_chosen(gradients.label, candidates)
        else:
            dense = self._by(aggregator, self._compressor, gradients)
        return dense + rows, plain + rows

    def _by(
        self,
        aggregator: GradientAggregator,
        compressor: Compressor | None,
        gradients: StepGradients,
    ) -> float:
        is_compressed = isinstance(aggregator, CompressedAggregator)
        by_hosts = is_compressed and aggregator.sums_by_hosts(gradients)
        return self._dense(gradients, compressor, by_hosts)

    def _dense(
        self, gradients: StepGradients, compressor: Compressor | None, by_hosts: bool
    ) -> float:
        dense = [g for g in gradients.values if not isinstance(g, tf.IndexedSlices)]
        dense = [g for g in dense if g.shape.is_fully_defined()]
        found = traffic(
            compressor,
            [g.shape.as_list() for g in dense],
            [g.dtype for g in dense],
            self._size,
            self._bucket_bytes,
            # Without them, the model's host is a rank.
            self._hosts if by_hosts else None,
            by_hosts,
            self._to_owners,
        )
        if not by_hosts:
            return found.sent
        return found.sent / ranks_of_a_host(self._hosts) + found.local

    def _rows(self, gradients: StepGradients) -> tf.Tensor | float:
        """Returns the bytes of sparse gradients, whose rows go to all other ranks."""
        sent = 0.0
        for gradient in gradients.values:
            if isinstance(gradient, tf.IndexedSlices):
                row = gradient.values.shape[1:].num_elements() * gradient.values.dtype.size
                count = tf.cast(tf.shape(gradient.indices)[0], tf.float64)
                sent += count * (row + _INDEX_BYTES) * (self._size - 1)
        return sent
