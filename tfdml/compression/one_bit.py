"""One bit for each number: its sign; and two means for each block."""

import keras
import tensorflow as tf

from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.packing import (
    bytes_to_floats,
    finite_or_nan,
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

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers; see `ChunkCompressor`."""
        rows = values.shape[0]
        blocks = tf.reshape(values, [rows, -1, self.block])
        positive = blocks > 0
        # Halved blocks of huge numbers must not overflow: the mean is taken first.
        share = tf.cast(positive, tf.float32) / self.block
        other = 1.0 / self.block - share
        high = tf.math.divide_no_nan(tf.reduce_sum(blocks * share, 2), tf.reduce_sum(share, 2))
        low = tf.math.divide_no_nan(tf.reduce_sum(blocks * other, 2), tf.reduce_sum(other, 2))
        means = tf.concat([finite_or_nan(blocks, high), finite_or_nan(blocks, low)], 1)
        codes = tf.reshape(tf.cast(positive, tf.uint8), [rows, -1])
        return tf.concat([floats_to_bytes(means), pack(codes, 1)], 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the numbers that bytes stand for; see `ChunkCompressor`."""
        rows, blocks = payload.shape[0], length // self.block
        means = bytes_to_floats(payload[:, : 8 * blocks], tf.float32)
        codes = tf.reshape(unpack(payload[:, 8 * blocks :], 1), [rows, blocks, self.block])
        high, low = means[:, :blocks, None], means[:, blocks:, None]
        return tf.reshape(tf.where(codes > 0, high, low), [rows, length])
