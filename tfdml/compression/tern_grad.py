"""TernGrad: each number becomes -1, 0 or 1 times the block's largest, at random."""

from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.packing import largest_or_nan, sums_of_squares
from tfdml.compression.qsgd import QSGD


@keras.saving.register_keras_serializable("tfdml")
class TernGrad(ChunkCompressor):
    """Sends gradients as -1, 0 or 1, in 2 bits each, after cutting off what is far out.

    Rounding is random and right on average; what is cut off is not.

    Args:
        clip: Numbers beyond this many standard deviations of their block of 4096 are cut off;
            the paper's 2.5. A few large numbers would else turn all others into 0.

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
        # Two bits hold the codes of a single level, either side of 0.
        self._codec = QSGD(bits=2, bucket_size=self.block, stochastic=True)

    @property
    def native(self) -> dict[str, Any]:
        """What `tfdml.native` calls this; see `ChunkCompressor`."""
        return {"codec": "terngrad", "clip": self.clip}

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"clip": self.clip}

    def row_bytes(self, length: int) -> int:
        """Returns the bytes of a row; see `ChunkCompressor`."""
        return self._codec.row_bytes(length)

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers; see `ChunkCompressor`."""
        blocks = tf.reshape(values, [values.shape[0], -1, self.block])
        # Of numbers from -1 to 1, whose squares neither vanish nor overflow.
        largest = largest_or_nan(blocks)
        units = tf.math.divide_no_nan(blocks, largest[:, :, None])
        spread = tf.sqrt(sums_of_squares(units) / self.block)
        bound = (self.clip * spread * largest)[:, :, None]
        # Not finite, it must stay so.
        clipped = tf.where(tf.abs(blocks) > bound, tf.sign(blocks) * bound, blocks) + 0.0 * blocks
        return self._codec.encode(tf.reshape(clipped, values.shape), seed)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the numbers that bytes stand for; see `ChunkCompressor`."""
        return self._codec.decode(payload, length)
