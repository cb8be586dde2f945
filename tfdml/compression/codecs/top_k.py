"""Top-k sparsification: sends only the largest values and their indices."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.codecs.selection import decoded_rows, decoded_sum, encoded_largest
from tfdml.compression.compressor import ChunkCompressor


def check_ratio(ratio: float) -> float:
    """Returns the ratio as a float.

    Raises:
        ValueError: If `ratio` is not above 0 and at most 1.
    """
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ValueError(
            f"`ratio` must be the part that is sent, above 0 and at most 1. Received: "
            f"ratio={ratio!r}."
        )
    return float(ratio)


@keras.saving.register_keras_serializable("tfdml")
class TopK(ChunkCompressor):
    """Compressor that sends the largest values of each chunk, 8 bytes each, with error feedback.

    Args:
        ratio: Fraction of all values that is sent.

    Raises:
        ValueError: If `ratio` is not above 0 and at most 1.

    Reference:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.
    """

    block = 8
    static = False

    def __init__(self, ratio: float = 0.01):
        self.ratio = check_ratio(ratio)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"ratio": self.ratio}

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return 8 * self._count(length)

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        count = self._count(values.shape[1])
        return encoded_largest(values, count, count)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        return decoded_rows(payload, length)

    def decode_sum(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes the rows and sums them; see `ChunkCompressor`."""
        return decoded_sum(payload, length)

    def _count(self, length: int) -> int:
        return max(1, math.ceil(self.ratio * length))
