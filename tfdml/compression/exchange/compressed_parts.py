"""Sums of gradients at the ranks that own them, compressed on the way, with error feedback."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, GradientAggregator, StepGradients, on_device
from tfdml.collectives.buckets import BUCKET_BYTES, Bucket
from tfdml.collectives.collective import Collective
from tfdml.collectives.part_exchange import (
    PartAggregator,
    after_all,
    all_finite,
    nan_unless_finite,
)
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.exchange.compressed_buckets import compressed_buckets
from tfdml.compression.exchange.kept_state import KeptState
from tfdml.compression.exchange.state_bytes import state_bytes
from tfdml.compression.exchange.step_state import (
    Commit,
    can_be_compressed,
    commit_if,
    commits_of,
    counted_step,
    memories_of,
    step_scales,
    values_of,
)
from tfdml.compression.exchange.to_owners import sum_at_owners


class CompressedPartAggregator(GradientAggregator):
    """Aggregator that sums each gradient on the rank that owns it, compressed on the way there.

    Each rank keeps its own compression error of the whole gradient, and adds it to the next one, as
    `CompressedAggregator` does. The sums are not encoded again: their owner uses them as they are.

    Args:
        collective: Collective that moves tensors between ranks.
        compressor: Compressor of the gradients; see `can_send_to_owners`.
        bucket_bytes: Bytes of gradients that are exchanged together.
        state: Dict that receives the state variables; aggregators may share it.
        prefix: Prefix of the exchanges' names.
    """

    def __init__(
        self,
        collective: Collective,
        compressor: ChunkCompressor,
        bucket_bytes: int = BUCKET_BYTES,
        state: dict[str, tf.Variable] | None = None,
        prefix: str = "",
    ):
        self._collective = collective
        self._compressor = compressor
        self._bucket_bytes = bucket_bytes
        self._prefix = prefix
        self._kept = KeptState({} if state is None else state, prefix)
        self._uncompressed = PartAggregator(collective, bucket_bytes, prefix)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """This rank's own variables that are kept between steps, by name."""
        return dict(self._kept.variables)

    def state_bytes(self, gradients: StepGradients) -> dict[str, int]:
        """Returns the bytes of `state` after a step; see `GradientAggregator`."""
        compressed, plain = self._divided(gradients)
        return state_bytes(
            self._compressor,
            self._collective.size,
            gradients.at(plain),
            [
                gradients.at(bucket.indices)
                for bucket in self._compressed_buckets(compressed, gradients)
            ],
            f"{self._prefix}{gradients.label}",
            owners_keep=False,
        )

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the state of an earlier job's ranks; see `GradientAggregator`."""
        self._kept.restore(before, self._collective.rank, self._collective.size)

    def buckets(self, gradients: StepGradients) -> list[Bucket]:
        """Returns which gradients are exchanged together; see `GradientAggregator`."""
        compressed, plain = self._divided(gradients)
        uncompressed = self._uncompressed.buckets(gradients.at(plain))
        return [
            *self._compressed_buckets(compressed, gradients),
            *(Bucket([plain[i] for i in b.indices], b.nbytes) for b in uncompressed),
        ]

    def aggregate(self, gradients: StepGradients) -> list[Gradient]:
        """Returns the sums of this rank's parts of the gradients; see `PartAggregator`."""
        compressed, plain = self._divided(gradients)
        sums: list[Gradient | None] = [None] * len(gradients.values)
        commits: list[Commit] = []
        scales = step_scales(self._kept, self._compressor, gradients, commits)
        totals, received = self._uncompressed.sums(gradients.at(plain))
        for i, total in zip(plain, totals, strict=True):
            sums[i] = total
        step = counted_step(self._kept, commits)
        memory = self._compressor.memory(self._collective.size)
        buckets = self._compressed_buckets(compressed, gradients)
        for number, bucket in enumerate(buckets):
            own = gradients.at(bucket.indices)
            memories = memories_of(self._kept, memory, own)
            of_bucket = f"{self._prefix}{gradients.label}/to_owners_{number}"
            with on_device(gradients.devices, bucket.indices) as device:
                collective = self._collective.on(device)
                totals, arrived, states = sum_at_owners(
                    collective,
                    self._compressor,
                    collective.noted(own.values, f"{of_bucket}:ready"),
                    own.cuts,
                    [values_of(m) for m in memories],
                    scales,
                    step,
                    of_bucket,
                )
                totals = collective.noted(totals, f"{of_bucket}:done")
            received.append(arrived)
            commits += commits_of(memories, states)
            for i, total in zip(bucket.indices, totals, strict=True):
                sums[i] = total
        sums = after_all(received, sums)
        finite = all_finite(sums)
        if gradients.may_overflow:
            label = f"{self._prefix}{gradients.label}"
            sums, finite = nan_unless_finite(self._collective, sums, finite, label)
        commit_if(finite, commits)
        return sums

    def _compressed_buckets(self, indices: Sequence[int], gradients: StepGradients) -> list[Bucket]:
        return compressed_buckets(self._compressor, indices, gradients, self._bucket_bytes)

    def _divided(self, gradients: StepGradients) -> tuple[list[int], list[int]]:
        """Returns the indices of the gradients that are compressed, and of the others."""
        count = len(gradients.values)
        compressed = [
            i
            for i in range(count)
            # Without cuts, only sizes are asked for.
            if (not gradients.cuts or gradients.cuts[i] is not None)
            and can_be_compressed(gradients.values[i], self._compressor)
        ]
        return compressed, [i for i in range(count) if i not in compressed]
