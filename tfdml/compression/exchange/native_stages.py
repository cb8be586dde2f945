"""The stages of two-phase sums in `tfdml.native`'s C++ operations, each one pass over memory."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from tfdml import native
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import ErrorFeedback, NoMemory, State


def operations(compressor: ChunkCompressor, size: int) -> ModuleType | None:
    """Returns the compiled operations; None if they cannot be used.

    Args:
        compressor: The encoding.
        size: The number of processes.
    """
    # A subclass may encode differently, so it has to set `native` itself.
    has_it = vars(type(compressor)).get("native") is not None
    if not has_it or type(compressor.memory(size)) not in (ErrorFeedback, NoMemory):
        return None
    return native.usable()


class NativeStages:
    """The stages before, between and after the exchanges; see `two_phase`.

    Args:
        library: The compiled operations.
        compressor: The encoding.
        size: The number of processes.
        word: Bytes of a word; encoded rows are padded to a multiple of it.
    """

    def __init__(self, library: ModuleType, compressor: ChunkCompressor, size: int, word: int):
        self._library, self._compressor = library, compressor
        self._size, self._word_bytes = size, word

    def encode(
        self,
        gradients: Sequence[tf.Tensor],
        states: Sequence[State],
        scale: tf.Tensor,
        memory_scale: tf.Tensor,
        seed: tf.Tensor,
    ) -> tuple[tf.Tensor, list[State]]:
        """Returns the bytes of all chunks, and the new residuals."""
        payload, residuals = self._library.tfdml_encode(
            gradients=[tf.cast(g, tf.float32) for g in gradients],
            residuals=[s["residual"] for s in states if s],
            scale=scale,
            memory_scale=memory_scale,
            seed=seed,
            rows=self._size,
            **self._codec(self._chunk(g.shape for g in gradients)),
        )
        return payload, [{"residual": each} for each in residuals] or [{} for _ in states]

    def add(
        self,
        received: tf.Tensor,
        server: State,
        memory_scale: tf.Tensor,
        chunk: int,
        seed: tf.Tensor,
    ) -> tuple[tf.Tensor, State]:
        """Returns the encoded sum of a chunk, and the owner's new residual."""
        encoded, residuals = self._library.tfdml_add(
            received=received,
            residuals=list(server.values()),
            memory_scale=memory_scale,
            seed=seed,
            **self._codec(chunk),
        )
        return encoded, dict(zip(server, residuals, strict=True))

    def decode(
        self,
        gathered: tf.Tensor,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[tf.DType],
        scale: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the sums, and whether all of them are finite."""
        sums, finite = self._library.tfdml_decode(
            gathered=gathered,
            scale=scale,
            n=len(shapes),
            shapes=shapes,
            **self._codec(self._chunk(shapes)),
        )
        return [tf.cast(s, d) for s, d in zip(sums, dtypes, strict=True)], finite

    def _chunk(self, shapes) -> int:
        return chunk_length(sum(map(math.prod, shapes)), self._size, self._compressor.block)

    def _codec(self, chunk: int) -> dict[str, Any]:
        row = self._compressor.row_bytes(chunk)
        return {
            **self._compressor.native,
            "block": self._compressor.block,
            "chunk": chunk,
            "row_bytes": row + -row % self._word_bytes,
        }


def chunk_length(length: int, size: int, block: int) -> int:
    """Returns the values of a bucket that each process sums: a multiple of `block`."""
    return -(-length // (size * block)) * block
