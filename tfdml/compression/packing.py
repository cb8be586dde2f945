"""Small numbers in fewer than 8 bits, and floats among bytes."""

import tensorflow as tf


def pack(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Packs numbers below `2**bits` into bytes.

    Args:
        codes: uint8, shape `[rows, n]`, with `n` a multiple of `8 / bits`.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8, shape `[rows, n * bits / 8]`.
    """
    if bits == 8:
        return codes
    per_byte = 8 // bits
    parts = tf.reshape(codes, [codes.shape[0], -1, per_byte])
    packed = parts[:, :, 0]
    for place in range(1, per_byte):
        shift = tf.constant(place * bits, tf.uint8)
        packed = tf.bitwise.bitwise_or(packed, tf.bitwise.left_shift(parts[:, :, place], shift))
    return packed


def unpack(packed: tf.Tensor, bits: int) -> tf.Tensor:
    """Returns the numbers that `pack` was given: uint8, shape `[rows, n]`."""
    if bits == 8:
        return packed
    mask = tf.constant(2**bits - 1, tf.uint8)
    parts = [
        tf.bitwise.bitwise_and(
            tf.bitwise.right_shift(packed, tf.constant(p * bits, tf.uint8)), mask
        )
        for p in range(8 // bits)
    ]
    return tf.reshape(tf.stack(parts, 2), [packed.shape[0], -1])


def floats_to_bytes(values: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of floats, of shape `[rows, n]`: uint8, `[rows, n * bytes of one]`."""
    return tf.reshape(tf.bitcast(values, tf.uint8), [values.shape[0], -1])


def bytes_to_floats(payload: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the floats of `floats_to_bytes`, shape `[rows, n]`."""
    return tf.bitcast(tf.reshape(payload, [payload.shape[0], -1, dtype.size]), dtype)


def finite_or_nan(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns `scale`, or NaN for each block in which a number is not finite.

    Args:
        values: float32, shape `[rows, blocks, block]`.
        scale: float32, shape `[rows, blocks]`.
    """
    # One number of a block that is not finite makes this NaN, whatever a maximum does with NaN.
    probe = tf.reduce_sum(values * 0.0, 2)
    return scale + probe
