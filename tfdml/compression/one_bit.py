"""One bit for each number: its sign; and two means for each block."""

import keras
import tensorflow as tf

from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.packing import (
    block_sums,
    bytes_to_floats,
    floats_to_bytes,
    pack,
    unpack,
)


@keras.saving.register_keras_serializable("tfdml")
class OneBit(ChunkCompressor):
    """Sends signs, and for each block of 512 the mean of its positive and of its negative numbers.

    What is left out is fed back on the worker and on the chunk's owner: without that it does not
    converge.

    Reference:
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs", Interspeech 2014.
    """

    block = 512

    def row_bytes(self, length: int) -> int:
        """Returns the bytes of a row; see `ChunkCompressor`."""
        return length // self.block * 8 + length // 8

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers; see `ChunkCompressor`."""
        rows = values.shape[0]
        blocks = tf.reshape(values, [rows, -1, self.block])
        # Halved blocks of huge numbers must not overflow: shares of the mean are added.
        positive = tf.cast(blocks > 0, tf.float32)
        share = positive / self.block
        part = block_sums(share)
        above, below = block_sums(blocks * share), block_sums(blocks * (1.0 / self.block - share))
        high = tf.math.divide_no_nan(above, part)
        low = tf.math.divide_no_nan(below, 1.0 - part)
        # What is not finite makes both so: a comparison with NaN is false.
        probe = 0.0 * (above + below)
        means = tf.concat([high + probe, low + probe], 1)
        codes = tf.reshape(tf.cast(positive, tf.uint8), [rows, -1])
        return tf.concat([floats_to_bytes(means), pack(codes, 1, self.block)], 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the numbers that bytes stand for; see `ChunkCompressor`."""
        rows, blocks = payload.shape[0], length // self.block
        means = bytes_to_floats(payload[:, : 8 * blocks], tf.float32)
        codes = tf.reshape(
            unpack(payload[:, 8 * blocks :], 1, self.block), [rows, blocks, self.block]
        )
        high, low = means[:, :blocks, None], means[:, blocks:, None]
        return tf.reshape(tf.where(codes > 0, high, low), [rows, length])
