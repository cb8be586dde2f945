"""Encoded sums of gradients at their owners, the ranks that update them: one exchange."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.cut import Cut
from tfdml.compression.compressor import ChunkCompressor, Compressor
from tfdml.compression.error_feedback import Scales, State
from tfdml.compression.exchange.native_stages import chunk_length
from tfdml.compression.exchange.two_phase import payload_bytes, seed_of, stages


def can_send_to_owners(compressor: Compressor) -> bool:
    """Returns whether a compressor can encode the part of each owner on its own."""
    is_chunked = isinstance(compressor, ChunkCompressor) and not compressor.replaces_momentum
    return is_chunked and compressor.memory(1).elementwise


def sum_at_owners(
    collective: Collective,
    compressor: ChunkCompressor,
    gradients: Sequence[tf.Tensor],
    cuts: Sequence[Cut],
    states: Sequence[State],
    scales: Scales,
    step: tf.Tensor,
    name: str,
) -> tuple[list[tf.Tensor], tf.Tensor, list[State]]:
    """Sums each gradient of a bucket at the ranks that own its parts.

    Each rank encodes every owner's part and sends it there, where the decoded parts are added up in
    the order of the ranks. So a rank sends (N-1)/N of the encoded bucket.

    Args:
        collective: Collective that moves tensors between N ranks.
        compressor: The encoding; see `can_send_to_owners`.
        gradients: This rank's gradients, whole.
        cuts: Their divisions among the ranks.
        states: State of the compressor's memory for each gradient.
        scales: The step's factors.
        step: The step, which seeds the random numbers: int32, shape `[]`.
        name: Name of the exchange.

    Returns:
        The sums of this rank's parts; a number that needs the exchange; and the new states.
    """
    ranks, own = collective.size, collective.rank
    sums: list[tf.Tensor | None] = [None] * len(gradients)
    after: list[State] = [{}] * len(gradients)
    groups = []
    for number, (codec, indices) in enumerate(compressor.parts([g.shape for g in gradients])):
        group = _Group(codec, indices, [cuts[i] for i in indices])
        seeds = [seed_of(step, own, f"{name}/{number}/{rank}") for rank in range(ranks)]
        group.encode([gradients[i] for i in indices], [states[i] for i in indices], scales, seeds)
        for i, state in zip(indices, group.states, strict=True):
            after[i] = state
        groups.append(group)
    counts = [sum(group.nbytes[rank] for group in groups) for rank in range(ranks)]
    packed = tf.concat([group.payloads[rank] for rank in range(ranks) for group in groups], 0)
    received = collective.all_to_all_rows(packed, counts, name)
    sizes = [group.nbytes[own] for group in groups]
    for group, payload in zip(groups, tf.split(received, sizes, 1), strict=True):
        for i, total in zip(group.indices, group.decoded_sums(payload, own, scales), strict=True):
            sums[i] = tf.cast(total, gradients[i].dtype)
    return sums, tf.cast(received[0, 0], tf.float32), after


class _Group:
    """Gradients of a bucket with one codec, which encodes each rank's parts as a row of values.

    Attributes:
        indices: Indices of the gradients in the bucket.
        nbytes: Bytes of each rank's encoded row.
        payloads: The encoded rows; after `encode`.
        states: The memory's new state of each gradient; after `encode`.
    """

    def __init__(self, codec: ChunkCompressor, indices: Sequence[int], cuts: Sequence[Cut]):
        self.indices, self.payloads, self.states = indices, [], []
        self._codec, self._cuts = codec, cuts
        self._lengths = [sum(cut.sizes[rank] for cut in cuts) for rank in range(cuts[0].ranks)]
        # A row of at least a block, because no exchange may be without bytes.
        self._chunks = [chunk_length(max(1, length), 1, codec.block) for length in self._lengths]
        self.nbytes = [payload_bytes(codec, chunk) for chunk in self._chunks]

    def encode(
        self,
        gradients: Sequence[tf.Tensor],
        states: Sequence[State],
        scales: Scales,
        seeds: Sequence[tf.Tensor],
    ) -> None:
        """Encodes this rank's gradients for each owner, with a seed for each."""
        encode, _, _ = stages(self._codec, 1)
        pieces = [_pieces(g, cut) for g, cut in zip(gradients, self._cuts, strict=True)]
        kept = [
            {key: _pieces(value, cut) for key, value in state.items()}
            for state, cut in zip(states, self._cuts, strict=True)
        ]
        after: list[dict[str, list]] = [{key: [] for key in state} for state in states]
        for rank, nbytes in enumerate(self.nbytes):
            row = [piece[rank] for piece in pieces]
            if not self._lengths[rank]:
                self.payloads.append(tf.zeros([nbytes], tf.uint8))
                continue
            before = [{key: value[rank] for key, value in state.items()} for state in kept]
            payload, new = encode(row, before, *scales, seeds[rank])
            self.payloads.append(tf.ensure_shape(payload[0], [nbytes]))
            for of_gradient, state in zip(after, new, strict=True):
                for key, value in state.items():
                    of_gradient[key].append(value)
        self.states = [
            {key: tf.reshape(tf.concat(v, 0), cut.shape) for key, v in of_gradient.items()}
            for of_gradient, cut in zip(after, self._cuts, strict=True)
        ]

    def decoded_sums(self, received: tf.Tensor, own: int, scales: Scales) -> list[tf.Tensor]:
        """Returns the sums of an owner's parts: float32, times the loss scale.

        Args:
            received: Every rank's encoded row of them: uint8, `[ranks, bytes]`.
            own: The owner.
            scales: The step's factors.
        """
        ranks, chunk = len(self.nbytes), self._chunks[own]
        _, _, decode = stages(self._codec, ranks)
        (values,), _ = decode(received, ((ranks * chunk,),), (tf.float32,), scales.loss)
        rows = tf.unstack(tf.reshape(values, [ranks, chunk]))
        total = rows[0]
        for row in rows[1:]:
            total += row
        shapes = [cut.part_shape(own) for cut in self._cuts]
        sizes = [math.prod(shape) for shape in shapes]
        parts = tf.split(total[: sum(sizes)], sizes)
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _pieces(value: tf.Tensor, cut: Cut) -> list[tf.Tensor]:
    """Returns all ranks' parts of a gradient or of its state, flat."""
    return tf.split(tf.reshape(value, [-1]), cut.sizes)
