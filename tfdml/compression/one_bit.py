"""One bit for each number: its sign; and two means for each block."""

import keras
import tensorflow as tf

from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.packing import (
    bytes_to_floats,
    floats_to_bytes,
    pack,
    to_whole,
    unpack,
    whole_one,
)

# Of what is smaller, nothing is sent; and the bits of infinity.
_SMALLEST, _INFINITE = 2.0**-106, 0x7F800000


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
    native = {"codec": "onebit"}

    def row_bytes(self, length: int) -> int:
        """Returns the bytes of a row; see `ChunkCompressor`."""
        return length // self.block * 8 + length // 8

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers; see `ChunkCompressor`."""
        rows = values.shape[0]
        blocks = tf.reshape(values, [rows, -1, self.block])
        # The largest of the positive numbers and of the others, by their bits, which are ordered.
        bits = tf.bitcast(blocks, tf.int32)
        sizes = tf.bitwise.bitwise_and(bits, 0x7FFFFFFF)
        positive = bits > 0
        highest = tf.reduce_max(tf.where(positive, sizes, 0), 2)
        lowest = tf.reduce_max(tf.where(positive, 0, sizes), 2)
        high, low = tf.bitcast(highest, tf.float32), tf.bitcast(lowest, tf.float32)
        one = whole_one(self.block)
        inverses = [tf.where(t > _SMALLEST, one / t, 0.0)[:, :, None] for t in (high, low)]
        parts = to_whole(blocks * tf.where(positive, *inverses))
        above = tf.reduce_sum(tf.where(positive, parts, 0), 2)
        below = tf.reduce_sum(parts, 2) - above
        count = tf.reduce_sum(tf.cast(positive, tf.int32), 2)
        finite = (highest < _INFINITE) & (lowest < _INFINITE)
        means = tf.concat(
            [
                tf.where(finite, _mean(above, count, high / one), float("nan")),
                tf.where(finite, _mean(below, self.block - count, low / one), float("nan")),
            ],
            1,
        )
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


def _mean(sums: tf.Tensor, counts: tf.Tensor, unit: tf.Tensor) -> tf.Tensor:
    """Returns the mean of numbers that have been summed as whole ones."""
    return tf.cast(sums, tf.float32) / tf.cast(tf.maximum(counts, 1), tf.float32) * unit
