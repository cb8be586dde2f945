"""Natural compression: rounds each value to a power of two, at random and unbiased."""

import keras
import tensorflow as tf

from tfdml.compression.codecs.packing import bytes_to_floats, floats_to_bytes, largest_or_nan, noise
from tfdml.compression.compressor import ChunkCompressor

# Halvings of a block's largest magnitude that have a code; the code after them is 0.
_HALVINGS = 126


@keras.saving.register_keras_serializable("tfdml")
class NaturalCompression(ChunkCompressor):
    """Compressor that sends a value's sign and a power of two near it, in one byte.

    A value between two powers is rounded to one of them at random, so that the expectation is the
    value itself; the second moment grows by 1/8 at most. Powers are relative to the largest
    magnitude of a block of 512 values, down to 2**-126 of it.

    Reference:
        Horváth et al., "Natural Compression for Distributed Deep Learning", arXiv:1905.10988.
    """

    biased = False
    block = 512
    native = {"codec": "natural"}

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return length // self.block * 4 + length

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        blocks = tf.reshape(values, [values.shape[0], -1, self.block])
        largest = largest_or_nan(blocks)
        parts = tf.math.divide_no_nan(tf.abs(blocks), largest[:, :, None])
        # The exponent and the fraction above the power of two are read from the float's bits.
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
        """Decodes rows of values; see `ChunkCompressor`."""
        header = length // self.block * 4
        largest = bytes_to_floats(payload[:, :header], tf.float32)
        codes = tf.cast(payload[:, header:], tf.int32)
        codes = tf.reshape(codes, [payload.shape[0], -1, self.block])
        halvings = codes % 128
        # Builds the power of two from its bits.
        powers = tf.bitcast(tf.bitwise.left_shift(127 - halvings, 23), tf.float32)
        sizes = tf.where(halvings > _HALVINGS, tf.zeros_like(powers), powers)
        signed = tf.where(codes >= 128, -sizes, sizes) * largest[:, :, None]
        return tf.reshape(signed, [payload.shape[0], length])
