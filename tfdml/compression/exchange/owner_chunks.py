"""Gradients as rows of numbers, a chunk for each rank that owns one, sent exact or encoded.

The owner of a chunk decodes what all ranks have sent of it, and combines that in any way; then it
gives all ranks the result. `two_phase` does the same for sums, in fewer passes over memory.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients
from tfdml.collectives.collective import Collective
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.kept_state import KeptState
from tfdml.compression.exchange.native_stages import chunk_length
from tfdml.compression.exchange.step_state import Commit, commits_of, memories_of, values_of
from tfdml.compression.exchange.two_phase import exchanged, padded, seed_of, stages, unpadded


class ExactChunks:
    """Gradients of one dtype that are sent as they are.

    Args:
        collective: Collective between the owners.
        gradients: This rank's gradients.

    Attributes:
        chunk: Numbers of each owner's chunk; the last one is padded with zeros.
        own_commits: Updates of what this rank keeps of its gradients; after `to_owners`.
        owner_commits: Updates of what it keeps as an owner; after `to_all`.
    """

    def __init__(self, collective: Collective, gradients: Sequence[tf.Tensor]):
        self.gradients, self._size = list(gradients), collective.size
        self._rank = collective.rank
        self.chunk = -(-self._length // self._size)
        self.own_commits: list[Commit] = []
        self.owner_commits: list[Commit] = []

    @property
    def _length(self) -> int:
        return sum(g.shape.num_elements() for g in self.gradients)

    def rows(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns tensors of the gradients' shapes as rows: `[ranks, chunk]`."""
        flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
        flat = tf.pad(flat, [[0, self._size * self.chunk - self._length]])
        return tf.reshape(flat, [self._size, self.chunk])

    def own_chunk(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the chunk that this rank owns of tensors of the gradients' shapes: `[chunk]`."""
        return self.rows(tensors)[self._rank]

    def to_owners(self) -> tf.Tensor:
        """Returns what is sent to each owner: `[ranks, ...]`."""
        return self.rows(self.gradients)

    def decoded(self, received: tf.Tensor) -> tf.Tensor:
        """Returns each rank's part of the owned chunk: `[ranks, chunk]`.

        Args:
            received: What the ranks have sent by `to_owners`.
        """
        return received

    def to_all(self, total: tf.Tensor) -> tf.Tensor:
        """Returns what an owner sends to all ranks: `[1, ...]`.

        Args:
            total: The owned chunk of the result: `[chunk]`.
        """
        return total[tf.newaxis]

    def results(self, gathered: tf.Tensor) -> list[tf.Tensor]:
        """Returns the whole results, in the shapes of the gradients.

        Args:
            gathered: What the owners have sent by `to_all`: `[ranks, ...]`.
        """
        flat = tf.reshape(gathered, [-1])[: self._length]
        sizes = [g.shape.num_elements() for g in self.gradients]
        parts = zip(tf.split(flat, sizes), self.gradients, strict=True)
        return [tf.reshape(part, gradient.shape) for part, gradient in parts]


class EncodedChunks(ExactChunks):
    """Gradients that a codec encodes together, as one part of a bucket.

    Args:
        collective: Collective between the owners.
        codec: The codec.
        gradients: This rank's gradients: float32, without loss scale.
        name: Name of the part, which seeds its random numbers.
        kept: The state that is kept between steps.
        memory_scale: Factor of all kept state.
        step: The step, which seeds them, too: int32, shape `[]`.
    """

    def __init__(
        self,
        collective: Collective,
        codec: ChunkCompressor,
        gradients: StepGradients,
        name: str,
        kept: KeptState,
        memory_scale: tf.Tensor,
        step: tf.Tensor,
    ):
        super().__init__(collective, gradients.values)
        self.chunk = chunk_length(self._length, self._size, codec.block)
        self._codec = codec
        self._scales = Scales(tf.constant(1.0), memory_scale)
        self._seed = seed_of(step, collective.rank, name)
        self._memories = memories_of(kept, codec.memory(self._size), gradients)
        self._server = kept.owner_residual(
            f"{gradients.label}/{gradients.names[0]}", codec, self._length, collective.size
        )

    def to_owners(self) -> tf.Tensor:
        """Returns the bytes that are sent to each owner; see `ExactChunks`."""
        encode, _, _ = stages(self._codec, self._size)
        states = [values_of(variables) for variables in self._memories]
        payload, after = encode(self.gradients, states, *self._scales, self._seed)
        self.own_commits = commits_of(self._memories, after)
        return payload

    def decoded(self, received: tf.Tensor) -> tf.Tensor:
        """Returns each rank's decoded part of the owned chunk; see `ExactChunks`."""
        return self._codec.decode(unpadded(self._codec, received, self.chunk), self.chunk)

    def to_all(self, total: tf.Tensor) -> tf.Tensor:
        """Returns the bytes that an owner sends to all ranks; see `ExactChunks`."""
        for residual in values_of(self._server).values():
            total += residual * self._scales.memory
        encoded = self._codec.encode(total[tf.newaxis], self._seed + tf.constant([0, 1]))
        if self._server:
            after = {"residual": total - self._codec.decode(encoded, self.chunk)[0]}
            self.owner_commits = commits_of([self._server], [after])
        return padded(self._codec, encoded)

    def results(self, gathered: tf.Tensor) -> list[tf.Tensor]:
        """Returns the decoded results; see `ExactChunks`."""
        return super().results(self.decoded(gathered))


class OwnedBucket:
    """Exchange of a bucket's gradients: chunks to their owners, and then a result to all ranks.

    Args:
        collective: Collective between the owners, on the device that exchanges the bucket.
        parts: The bucket's chunks, each with the indices of its gradients.
        name: Prefix of the exchanges' names.

    Attributes:
        indices: Indices of the bucket's gradients.
        parts: As passed.
    """

    def __init__(
        self,
        collective: Collective,
        parts: Sequence[tuple[list[int], ExactChunks]],
        name: str,
    ):
        self.indices = [i for indices, _ in parts for i in indices]
        self.parts = list(parts)
        self._collective, self._name = collective, name

    def receive(self) -> list[tf.Tensor]:
        """Sends all chunks to their owners; returns the ranks' rows of each owned chunk."""
        sent = [chunks.to_owners() for _, chunks in self.parts]
        received = exchanged(self._collective.all_to_all, sent, f"{self._name}/to_owner")
        return [
            chunks.decoded(rows) for (_, chunks), rows in zip(self.parts, received, strict=True)
        ]

    def give(self, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gives all ranks what the owners have made of their chunks.

        Args:
            totals: The owned chunk of each part's result.

        Returns:
            The whole results, in the order of `indices`.
        """
        sent = [c.to_all(total) for (_, c), total in zip(self.parts, totals, strict=True)]
        gathered = exchanged(self._collective.all_gather, sent, f"{self._name}/to_all")
        results = []
        for (_, chunks), rows, own in zip(self.parts, gathered, sent, strict=True):
            rows = tf.ensure_shape(rows, [self._collective.size, own.shape[1]])
            results += chunks.results(rows)
        return results
