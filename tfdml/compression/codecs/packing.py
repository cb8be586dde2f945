"""Bit packing and other helpers of the codecs: bytes, noise, and order-independent sums."""

import math
from collections.abc import Sequence

import tensorflow as tf


def pack(codes: tf.Tensor, bits: int, group: int) -> tf.Tensor:
    """Packs integers below `2**bits` into bytes.

    A byte holds codes that are far apart in a group: the first byte holds the first code of each
    part of the group, the second byte the second, and so on. So neighbours are read and written
    together, and the work vectorizes.

    Args:
        codes: uint8, shape `[rows, n]`, with `n` a multiple of `group`.
        bits: Bits per code: 1, 2, 4 or 8.
        group: Codes per group: a multiple of `8 / bits`.

    Returns:
        uint8, shape `[rows, n * bits / 8]`.
    """
    if bits == 8:
        return codes
    parts = tf.reshape(codes, [codes.shape[0], -1, 8 // bits, group * bits // 8])
    # The codes' bits do not overlap, so the sum equals a bitwise "or".
    shifted = tf.bitwise.left_shift(parts, _shifts(bits))
    return tf.reshape(tf.reduce_sum(shifted, 2), [codes.shape[0], -1])


def unpack(packed: tf.Tensor, bits: int, group: int) -> tf.Tensor:
    """Returns the codes that `pack` packed: uint8, shape `[rows, n]`."""
    if bits == 8:
        return packed
    parts = tf.reshape(packed, [packed.shape[0], -1, 1, group * bits // 8])
    parts = tf.broadcast_to(parts, [*parts.shape[:2], 8 // bits, parts.shape[3]])
    mask = tf.constant(2**bits - 1, tf.uint8)
    codes = tf.bitwise.bitwise_and(tf.bitwise.right_shift(parts, _shifts(bits)), mask)
    return tf.reshape(codes, [packed.shape[0], -1])


def _shifts(bits: int) -> tf.Tensor:
    return tf.constant(list(range(0, 8, bits)), tf.uint8, [1, 1, 8 // bits, 1])


def floats_to_bytes(values: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of floats of shape `[rows, n]`: uint8, shape `[rows, n * itemsize]`."""
    return tf.reshape(tf.bitcast(values, tf.uint8), [values.shape[0], -1])


def bytes_to_floats(payload: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the floats that `floats_to_bytes` converted, shape `[rows, n]`."""
    return tf.bitcast(tf.reshape(payload, [payload.shape[0], -1, dtype.size]), dtype)


def noise(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    """Returns pseudorandom numbers in [0, 1): float32.

    They are a hash of each number's index, computed by a few integer operations that XLA fuses with
    their consumer; TensorFlow's generators take ten times as long as a codec.

    Args:
        shape: Shape of the result, with fewer than 2**32 numbers.
        seed: Seed: int32, shape `[2]`.

    Reference:
        Appleby, MurmurHash3: its mixing of 32 bits.
    """
    first, second = tf.unstack(tf.bitcast(seed, tf.uint32))
    hashed = tf.bitcast(tf.range(math.prod(shape), dtype=tf.int32), tf.uint32)
    for key in (first, second):
        hashed = _mixed(hashed + _mixed(key + tf.constant(0x9E3779B9, tf.uint32)))
    # The bits of floats in [1, 2).
    top = tf.bitcast(tf.bitwise.right_shift(hashed, tf.constant(9, tf.uint32)), tf.int32)
    ones = tf.bitcast(tf.bitwise.bitwise_or(top, 0x3F800000), tf.float32)
    return tf.reshape(ones - 1.0, shape)


def _mixed(bits: tf.Tensor) -> tf.Tensor:
    """Returns uint32 in which every bit depends on all bits of the input."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        shifted = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        bits = tf.bitwise.bitwise_xor(bits, shifted)
        if factor is not None:
            bits *= tf.constant(factor, tf.uint32)
    return bits


def largest_or_nan(blocks: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude of each block, NaN if one of its values is not finite.

    Args:
        blocks: float32, shape `[rows, blocks, block]`.
    """
    # The bits of magnitudes have the order of the magnitudes, with those that are not finite last.
    # An integer maximum needs no special case for NaN, so it vectorizes.
    bits = tf.bitwise.bitwise_and(tf.bitcast(blocks, tf.int32), 0x7FFFFFFF)
    largest = tf.reduce_max(bits, 2)
    return tf.where(largest < 0x7F800000, tf.bitcast(largest, tf.float32), float("nan"))


def fixed_point_one(block: int) -> float:
    """Returns the integer that stands for 1 where a block's values up to 1 are summed as integers.

    Such sums fit into int32 and do not depend on the order of summation.
    """
    return 2.0 ** (30 - math.ceil(math.log2(block)))


def round_to_int(values: tf.Tensor) -> tf.Tensor:
    """Returns the values rounded to integers: int32."""
    return tf.cast(tf.round(values), tf.int32)


def sums_of_squares(units: tf.Tensor) -> tf.Tensor:
    """Returns the sum of squares of each block: float32, shape `[rows, blocks]`.

    Squares are summed as integers, their high and low bits separately, so that no bits are lost and
    the sums fit into int32.

    Args:
        units: Values from -1 to 1, shape `[rows, blocks, block]`.
    """
    low_bits = min(15, 30 - math.ceil(math.log2(units.shape[2])))
    whole = round_to_int(units * units * 4.0**low_bits)
    high = tf.reduce_sum(tf.bitwise.right_shift(whole, low_bits), 2)
    low = tf.reduce_sum(tf.bitwise.bitwise_and(whole, 2**low_bits - 1), 2)
    sums = tf.cast(high, tf.float32) * 2.0**low_bits + tf.cast(low, tf.float32)
    return sums / 4.0**low_bits
