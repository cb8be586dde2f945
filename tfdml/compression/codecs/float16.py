"""Half precision on the wire, with a scale per block that keeps small float16 gradients."""

import keras
import tensorflow as tf

from tfdml.compression.codecs.packing import bytes_to_floats, floats_to_bytes, largest_or_nan
from tfdml.compression.compressor import ChunkCompressor

# The largest magnitude of a block is scaled into [2**13, 2**14), well below float16's largest,
# 65504: the exponent's bits of that, and the limit of the power of two that scales.
_TOP, _MOST = 127 + 13, 120


@keras.saving.register_keras_serializable("tfdml")
class Float16(ChunkCompressor):
    """Compressor that sends gradients as float16: half the bytes.

    Each block of 4096 values is multiplied by a power of two, so that gradients as small as 1e-30
    survive; sums are computed in float32.
    """

    biased = False
    block = 4096
    native = {"codec": "float16"}

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return length // self.block * 4 + 2 * length

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        blocks = tf.reshape(values, [values.shape[0], -1, self.block])
        largest = largest_or_nan(blocks)
        # Builds the power of two from its bits.
        power = _TOP - tf.bitwise.right_shift(tf.bitcast(largest, tf.int32), 23)
        bits = tf.bitwise.left_shift(tf.clip_by_value(power, -_MOST, _MOST) + 127, 23)
        scale = tf.bitcast(bits, tf.float32) + 0.0 * largest
        halves = tf.cast(blocks * scale[:, :, None], tf.float16)
        halves = tf.reshape(halves, [values.shape[0], -1])
        return tf.concat([floats_to_bytes(scale), floats_to_bytes(halves)], 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        header = length // self.block * 4
        scale = bytes_to_floats(payload[:, :header], tf.float32)
        halves = bytes_to_floats(payload[:, header:], tf.float16)
        blocks = tf.reshape(tf.cast(halves, tf.float32), [payload.shape[0], -1, self.block])
        return tf.reshape(blocks / scale[:, :, None], [payload.shape[0], length])


@keras.saving.register_keras_serializable("tfdml")
class BFloat16(ChunkCompressor):
    """Compressor that sends bfloat16: half the bytes, float32's range, 8 bits of precision."""

    block = 512
    native = {"codec": "bfloat16"}

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return 2 * length

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        return floats_to_bytes(tf.cast(values, tf.bfloat16))

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        return tf.cast(bytes_to_floats(payload, tf.bfloat16), tf.float32)
