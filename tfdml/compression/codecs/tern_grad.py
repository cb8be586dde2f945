"""TernGrad: each value becomes -1, 0 or 1 times the block's largest magnitude, at random."""

from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.codecs.packing import largest_or_nan, sums_of_squares
from tfdml.compression.codecs.qsgd import QSGD
from tfdml.compression.compressor import ChunkCompressor


@keras.saving.register_keras_serializable("tfdml")
class TernGrad(ChunkCompressor):
    """Compressor that sends gradients as -1, 0 or 1, in 2 bits each, after clipping outliers.

    Rounding is random and unbiased; clipping is not.

    Args:
        clip: Values beyond this many standard deviations of their block of 4096 are clipped; the
            paper's is 2.5. Without clipping, a few large values would turn all others into 0.

    Raises:
        ValueError: If `clip` is not positive.

    Reference:
        Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
        Learning", arXiv:1705.07878.
    """

    biased = False
    block = 4096

    def __init__(self, clip: float = 2.5):
        if not isinstance(clip, int | float) or not clip > 0:
            raise ValueError(f"`clip` must be positive. Received: clip={clip!r}.")
        self.clip = float(clip)
        # With 2 bits there is one level on either side of 0.
        self._codec = QSGD(bits=2, bucket_size=self.block, stochastic=True)

    @property
    def native(self) -> dict[str, Any]:
        """Arguments that select this encoding in `tfdml.native`; see `ChunkCompressor`."""
        return {"codec": "terngrad", "clip": self.clip}

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"clip": self.clip}

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return self._codec.row_bytes(length)

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        blocks = tf.reshape(values, [values.shape[0], -1, self.block])
        # Computed for values from -1 to 1, whose squares neither vanish nor overflow.
        largest = largest_or_nan(blocks)
        units = tf.math.divide_no_nan(blocks, largest[:, :, None])
        spread = tf.sqrt(sums_of_squares(units) / self.block)
        bound = (self.clip * spread * largest)[:, :, None]
        # Adding 0 times the values keeps those that are not finite.
        clipped = tf.where(tf.abs(blocks) > bound, tf.sign(blocks) * bound, blocks) + 0.0 * blocks
        return self._codec.encode(tf.reshape(clipped, values.shape), seed)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        return self._codec.decode(payload, length)
