"""Natural compression: each number becomes a power of two, at random and right on average."""

import keras
import tensorflow as tf

from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.packing import bytes_to_floats, floats_to_bytes, largest_or_nan, noise

# How many halvings of a block's largest number there are codes for; the last code is 0.
_HALVINGS = 126


@keras.saving.register_keras_serializable("tfdml")
class NaturalCompression(ChunkCompressor):
    """Sends a number's sign and a power of two near it, in one byte.

    A number between two powers becomes the one or the other, at random, so that the mean is the
    number itself; its variance grows by 1/8 at most. Powers are counted from the largest of 512
    numbers down to 2**-126 of it.

    Reference:
        Horváth et al., "Natural Compression for Distributed Deep Learning", arXiv:1905.10988.
    """

    biased = False
    block = 512
    native = {"codec": "natural"}

    def row_bytes(self, length: int) -> int:
        """Returns the bytes of a row; see `ChunkCompressor`."""
        return length // self.block * 4 + length

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers; see `ChunkCompressor`."""
        blocks = tf.reshape(values, [values.shape[0], -1, self.block])
        largest = largest_or_nan(blocks)
        parts = tf.math.divide_no_nan(tf.abs(blocks), largest[:, :, None])
        # The exponent, and what is above the power of two, are bits of the number.
        bits = tf.bitcast(parts, tf.int32)
        power = tf.bitwise.right_shift(bits, 23) - 127
        rest = tf.cast(tf.bitwise.bitwise_and(bits, 0x7FFFFF), tf.float32) * 2.0**-23
        power = tf.cast(power, tf.float32)
        power += tf.cast(noise(parts.shape, seed) < rest, tf.float32)
        halvings = tf.minimum(-power, _HALVINGS)
        halvings = tf.where(parts > 0, tf.maximum(halvings, 0.0), float(_HALVINGS + 1))
        halvings = tf.where(tf.math.is_finite(halvings), halvings, tf.zeros_like(halvings))
        codes = tf.cast(tf.where(blocks < 0, halvings + 128.0, halvings), tf.uint8)
        header = floats_to_bytes(largest)
        return tf.concat([header, tf.reshape(codes, [values.shape[0], -1])], 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the numbers that bytes stand for; see `ChunkCompressor`."""
        header = length // self.block * 4
        largest = bytes_to_floats(payload[:, :header], tf.float32)
        codes = tf.cast(payload[:, header:], tf.int32)
        codes = tf.reshape(codes, [payload.shape[0], -1, self.block])
        halvings = codes % 128
        # The power of two, made of its bits.
        powers = tf.bitcast(tf.bitwise.left_shift(127 - halvings, 23), tf.float32)
        sizes = tf.where(halvings > _HALVINGS, tf.zeros_like(powers), powers)
        signed = tf.where(codes >= 128, -sizes, sizes) * largest[:, :, None]
        return tf.reshape(signed, [payload.shape[0], length])
