"""1-bit compression: sends each value's sign, with one scale per row and per column of a tile."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.compression.codecs.packing import (
    bytes_to_floats,
    fixed_point_one,
    floats_to_bytes,
    largest_or_nan,
    pack,
    round_to_int,
    unpack,
)
from tfdml.compression.compressor import ChunkCompressor

# Rows with a smaller largest magnitude are sent as zeros.
_SMALLEST = 2.0**-100
# A tile has at least as many columns, and at most as many rows.
_COLUMNS, _ROWS = 512, 64
# The largest column scale, an integer; and the integer that stands for a row's largest magnitude.
# Their product fits into int32.
_MOST, _ONE = 255, 2.0**22


@keras.saving.register_keras_serializable("tfdml")
class OneBit(ChunkCompressor):
    """Compressor that sends signs, and for each tile of a matrix a scale per row and per column.

    A gradient of a dense layer or a convolution is a sum of outer products, so its magnitudes are
    close to the product of a row's and a column's scale, which differ by orders of magnitude. With
    one scale per block of values, or per column as in the paper, momentum loses accuracy.

    The error is fed back on the worker and on the chunk's owner: without that it does not converge.
    A column's scale is the sum of its magnitudes, in 8 bits; the rows' scales are those with the
    least squared error.

    Reference:
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs", Interspeech 2014; factored scales as in Shazeer and
        Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", arXiv:1804.04235.
    """

    def __init__(self) -> None:
        self._rows, self._columns = _ROWS, _COLUMNS
        self._tiled: dict[tuple[int, int], OneBit] = {}

    @classmethod
    def _with_tile(cls, rows: int, columns: int) -> "OneBit":
        codec = cls()
        codec._rows, codec._columns = rows, columns
        return codec

    @property
    def block(self) -> int:
        """Values per tile; see `ChunkCompressor`."""
        return self._rows * self._columns

    @property
    def native(self) -> dict[str, int | str]:
        """Arguments that select this encoding in `tfdml.native`; see `ChunkCompressor`."""
        return {"codec": "onebit", "columns": self._columns}

    def parts(self, shapes: Sequence[Sequence[int]]) -> list[tuple[ChunkCompressor, list[int]]]:
        """Returns a codec for each gradient, with tiles of its shape; see `ChunkCompressor`."""
        return [(self._for_shape(tuple(shape)), [i]) for i, shape in enumerate(shapes)]

    def _for_shape(self, shape: tuple[int, ...]) -> "OneBit":
        # If the matrix has short rows, a row of the tile holds several of them.
        columns = shape[-1] * -(-_COLUMNS // shape[-1])
        rows = -(-math.prod(shape) // columns)
        # Matrices with few rows get lower tiles, so that the chunks are not mostly padding.
        tile = min(_ROWS, max(8, rows // 8 // 8 * 8)), columns
        if tile not in self._tiled:
            self._tiled[tile] = self._with_tile(*tile)
        return self._tiled[tile]

    def row_bytes(self, length: int) -> int:
        """Returns the encoded size of a row in bytes; see `ChunkCompressor`."""
        return length // self.block * (4 * self._rows + self._columns) + length // 8

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes; see `ChunkCompressor`."""
        rows = values.shape[0]
        tiles = tf.reshape(values, [rows, -1, self._rows, self._columns])
        sizes = tf.abs(tiles)
        largest = largest_or_nan(tf.reshape(values, [rows, -1, self._columns]))
        largest = tf.reshape(largest, [rows, -1, self._rows])
        columns = self._sizes_of_columns(sizes, tf.reduce_max(largest, 2))
        # Row scales with the least squared error.
        whole = round_to_int(sizes * _inverse(largest, _ONE)[..., None])
        products = tf.reduce_sum(tf.cast(whole * columns[:, :, None], tf.int64), 3)
        squares = tf.reduce_sum(tf.cast(columns * columns, tf.int64), 2, keepdims=True)
        ratios = tf.cast(products, tf.float32) / tf.cast(squares, tf.float32)
        factors = ratios * (largest * (1.0 / _ONE))
        codes = tf.reshape(tf.cast(tf.bitcast(tiles, tf.int32) > 0, tf.uint8), [rows, -1])
        return tf.concat(
            [
                floats_to_bytes(tf.reshape(factors, [rows, -1])),
                tf.reshape(tf.cast(columns, tf.uint8), [rows, -1]),
                pack(codes, 1, self.block),
            ],
            1,
        )

    def _sizes_of_columns(self, sizes: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
        """Returns the column scales: integers from 1 to 255, proportional to the columns' sums.

        Args:
            sizes: Magnitudes, shape `[rows, tiles, rows of a tile, columns]`.
            largest: Each tile's largest magnitude, shape `[rows, tiles]`.
        """
        whole = round_to_int(
            sizes * _inverse(largest, fixed_point_one(self._rows))[..., None, None]
        )
        sums = tf.cast(tf.reduce_sum(whole, 2), tf.float32)
        scale = _MOST / tf.maximum(tf.reduce_max(sums, 2, keepdims=True), 1.0)
        return tf.maximum(round_to_int(sums * scale), 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Decodes rows of values; see `ChunkCompressor`."""
        rows, tiles = payload.shape[0], length // self.block
        ends = [4 * tiles * self._rows, tiles * self._columns, length // 8]
        factors, columns, codes = tf.split(payload, ends, 1)
        factors = tf.reshape(bytes_to_floats(factors, tf.float32), [rows, tiles, self._rows, 1])
        columns = tf.reshape(tf.cast(columns, tf.float32), [rows, tiles, 1, self._columns])
        codes = tf.reshape(unpack(codes, 1, self.block), [rows, tiles, self._rows, self._columns])
        sizes = factors * columns
        return tf.reshape(tf.where(codes > 0, sizes, -sizes), [rows, length])


def _inverse(largest: tf.Tensor, one: float) -> tf.Tensor:
    """Returns the factor from `largest` to `one`; 0 if `largest` is too small or not finite."""
    return tf.where(largest > _SMALLEST, one / largest, 0.0)
