"""QSGD: quantization to a few bits per value, with one scale per block of values."""

from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.codecs.packing import (
    bytes_to_floats,
    floats_to_bytes,
    largest_or_nan,
    noise,
    pack,
    sums_of_squares,
    unpack,
)
from tfdml.compression.compressor import ChunkCompressor

# The largest float32, and the smallest number whose inverse is finite.
_LARGEST, _SMALLEST = 3.4e38, 3e-39


@keras.saving.register_keras_serializable("tfdml")
class QSGD(ChunkCompressor):
    """Compressor that quantizes gradients to integers of 8, 4 or 2 bits, scaled block by block.

    Args:
        bits: Bits per value: fewer bits send less and have a larger error.
        bucket_size: Values that share a scale: fewer are more exact, at 4 bytes per scale.
        norm: The scale of a block: "max" uses all codes for the block's own range; "l2" is the
            paper's, for which the bound on the variance is proved.
        stochastic: Whether rounding is random and unbiased (the paper), or to the nearest code,
            which is faster and is made up for by error feedback.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        arXiv:1610.02132.
    """

    def __init__(
        self, bits: int = 8, bucket_size: int = 512, norm: str = "max", stochastic: bool = False
    ):
        if bits not in (8, 4, 2):
            raise ValueError(f"`bits` must be 8, 4 or 2. Received: bits={bits!r}.")
        if not isinstance(bucket_size, int) or bucket_size < 8 or bucket_size % 8:
            raise ValueError(
                f"`bucket_size` must be a positive multiple of 8. Received: "
                f"bucket_size={bucket_size!r}."
            )
        if norm not in ("max", "l2"):
            raise ValueError(f'`norm` must be "max" or "l2". Received: norm={norm!r}.')
        self.bits, self.block, self.norm, self.stochastic = bits, bucket_size, norm, stochastic
        # Codes from -levels to levels.
        self._levels = float(2 ** (bits - 1) - 1)

    @property
    def biased(self) -> bool:
        """Whether rounding is deterministic, so that its error is fed back."""
        return not self.stochastic

    @property
    def native(self) -> dict[str, Any]:
        """Arguments that select this encoding in `tfdml.native`; see `ChunkCompressor`."""
        return {
            "codec": "qsgd",
            "bits": self.bits,
            "l2": self.norm == "l2",
            "stochastic": self.stochastic,
        }

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "bits": self.bits,
            "bucket_size": self.block,
            "norm": self.norm,
            "stochastic": self.stochastic,
        }

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return length // self.block * 4 + length * self.bits // 8

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        rows = values.shape[0]
        blocks = tf.reshape(values, [rows, -1, self.block])
        largest = largest_or_nan(blocks)
        if self.norm == "l2":
            # The norm is taken of values from -1 to 1, whose squares neither vanish nor overflow.
            units = tf.math.divide_no_nan(blocks, largest[:, :, None])
            norm = tf.sqrt(sums_of_squares(units))
            largest *= tf.minimum(norm, _LARGEST / tf.maximum(largest, 1.0))
        step = largest * (1.0 / self._levels)
        # If the step is so small that its inverse is not finite, zeros are sent.
        inverse = tf.where(step > _SMALLEST, 1.0 / step, tf.zeros_like(step))
        codes = tf.clip_by_value(blocks * inverse[:, :, None], -self._levels, self._levels)
        codes = tf.floor(codes + noise(codes.shape, seed)) if self.stochastic else tf.round(codes)
        codes = tf.reshape(tf.cast(codes + self._levels, tf.uint8), [rows, -1])
        return tf.concat([floats_to_bytes(step), pack(codes, self.bits, self.block)], 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        header = length // self.block * 4
        step = bytes_to_floats(payload[:, :header], tf.float32)
        codes = (
            tf.cast(unpack(payload[:, header:], self.bits, self.block), tf.float32) - self._levels
        )
        blocks = tf.reshape(codes, [payload.shape[0], -1, self.block]) * step[:, :, None]
        return tf.reshape(blocks, [payload.shape[0], length])
