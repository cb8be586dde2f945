"""Encodings of table rows, and of their gradients, on the way between ranks."""

import abc
import math

import tensorflow as tf


class RowCodec(abc.ABC):
    """Encodes each row of a matrix by itself, as a row of fewer bytes."""

    @abc.abstractmethod
    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the encoded rows.

        Args:
            rows: Rows of a floating dtype, shape `[n, width]`.
        """

    @abc.abstractmethod
    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the rows; one with a number that is not finite has such a number again.

        Args:
            encoded: Encoded rows, shape `[n, *]`.
            dtype: The rows' dtype.
        """


class Unchanged(RowCodec):
    """Sends rows as they are."""

    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        """See `RowCodec`."""
        return rows

    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """See `RowCodec`."""
        del dtype
        return encoded


class BFloat16Rows(RowCodec):
    """Sends 2 bytes for each number: the first 8 bits of its fraction."""

    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        """See `RowCodec`."""
        return tf.cast(rows, tf.bfloat16)

    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """See `RowCodec`."""
        return tf.cast(encoded, dtype)


class Int8Rows(RowCodec):
    """Sends a byte for each number, in units of 1/127 of the row's largest, and 4 for the unit."""

    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        """See `RowCodec`."""
        rows = tf.cast(rows, tf.float32)
        finite = tf.reduce_all(tf.math.is_finite(rows), -1, keepdims=True)
        unit = tf.where(finite, tf.reduce_max(tf.abs(rows), -1, keepdims=True) / 127.0, math.nan)
        levels = tf.where(finite, tf.round(tf.math.divide_no_nan(rows, unit)), 1.0)
        return tf.concat([_bytes(tf.cast(levels, tf.int8)), _bytes(unit)], -1)

    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """See `RowCodec`."""
        levels = tf.bitcast(encoded[:, :-4], tf.int8)
        unit = tf.bitcast(encoded[:, -4:], tf.float32)
        return tf.cast(tf.cast(levels, tf.float32) * unit[:, tf.newaxis], dtype)


def _bytes(numbers: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of a matrix's rows."""
    flat = tf.bitcast(numbers, tf.uint8)
    return tf.reshape(flat, [tf.shape(numbers)[0], numbers.shape[1] * numbers.dtype.size])


# By the value of `Sharding(row_codec=...)`.
ROW_CODECS: dict[str | None, RowCodec] = {
    None: Unchanged(),
    "bfloat16": BFloat16Rows(),
    "int8": Int8Rows(),
}
