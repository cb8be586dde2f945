"""Random distinct indices: the first values of a pseudorandom permutation, compiled by XLA."""

import tensorflow as tf

# First of the three keys, which `tf.random.experimental.index_shuffle` adds to a seed of two.
_FIRST_KEY = 498247692
# Fewest bits that are permuted.
_LEAST_BITS = 16
# Below this length most permuted numbers are too large, so that they are permuted many times.
_SHORT = 2 ** (_LEAST_BITS - 2)


def distinct_indices(count: int, length: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns random distinct indices.

    They are those of `tf.random.experimental.index_shuffle`, which runs on processors only, takes
    several times as long, and draws one index twice if `length` is one more than a power of 4.

    Args:
        count: Number of indices.
        length: Upper limit of the indices, exclusive: at most 2**31.
        seed: int32, shape `[2]`.

    Returns:
        int32, shape `[count]`.

    Reference:
        Beaulieu et al., "The SIMON and SPECK Families of Lightweight Block Ciphers", IACR ePrint
        2013/404; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    if length < _SHORT:
        return tf.random.experimental.index_shuffle(tf.range(count), seed, length - 1)
    # Floats, because TensorFlow's functions hold int32 on the host.
    return tf.bitcast(_drawn(count, length, seed), tf.int32)


@tf.function(jit_compile=True)
def _drawn(count: int, length: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns the indices' bits as float32: counted numbers, permuted until they are indices."""
    cipher = _Cipher(max(_LEAST_BITS, (length - 1).bit_length()), seed)
    last = tf.constant(length - 1, tf.uint32)
    (drawn,) = tf.while_loop(
        lambda numbers: tf.reduce_any(numbers > last),
        lambda numbers: (tf.where(numbers > last, cipher.permuted(numbers), numbers),),
        (cipher.permuted(tf.bitcast(tf.range(count), tf.uint32)),),
    )
    return tf.bitcast(drawn, tf.float32)


class _Cipher:
    """Permutation of the numbers of some bits: Simon's, with four rounds.

    Args:
        bits: Number of bits; an odd one is increased by one.
        seed: int32, shape `[2]`.
    """

    def __init__(self, bits: int, seed: tf.Tensor):
        self._word = (bits + 1) // 2
        self._mask = tf.constant(2**self._word - 1, tf.uint32)
        words = [tf.constant(_FIRST_KEY, tf.uint32), *tf.unstack(tf.bitcast(seed, tf.uint32))]
        first, second, third = (word & self._mask for word in words)
        turned = self._turned(third, -3) ^ self._turned(third, -4)
        # The constant of the key schedule: all ones but for the last two bits, then its first bit.
        fourth = (self._mask ^ tf.constant(2, tf.uint32)) ^ first ^ turned
        self._keys = (first, second, third, fourth)

    def permuted(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the numbers at the places `numbers` of the permutation: uint32."""
        left = tf.bitwise.right_shift(numbers, tf.constant(self._word, tf.uint32))
        right = numbers & self._mask
        for of_left, of_right in (self._keys[:2], self._keys[2:]):
            left ^= self._mixed(right) ^ of_left
            right ^= self._mixed(left) ^ of_right
        return tf.bitwise.left_shift(left, tf.constant(self._word, tf.uint32)) | right

    def _mixed(self, word: tf.Tensor) -> tf.Tensor:
        return (self._turned(word, 1) & self._turned(word, 8)) ^ self._turned(word, 2)

    def _turned(self, word: tf.Tensor, by: int) -> tf.Tensor:
        """Returns a word whose bits are rotated to the left."""
        by %= self._word
        up = tf.bitwise.left_shift(word, tf.constant(by, tf.uint32))
        down = tf.bitwise.right_shift(word, tf.constant(self._word - by, tf.uint32))
        return (up | down) & self._mask
