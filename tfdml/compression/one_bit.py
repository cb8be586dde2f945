"""One bit for each number: its sign; its size is that of its row times that of its column."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.packing import (
    bytes_to_floats,
    floats_to_bytes,
    largest_or_nan,
    pack,
    to_whole,
    unpack,
    whole_one,
)

# Of what is smaller, nothing is sent.
_SMALLEST = 2.0**-100
# A tile has at least as many columns, and at most as many rows.
_COLUMNS, _ROWS = 512, 64
# Columns' sizes are whole numbers up to this; what stands for 1 of a row's numbers: both of them
# multiplied are whole numbers that int32 holds.
_MOST, _ONE = 255, 2.0**22


@keras.saving.register_keras_serializable("tfdml")
class OneBit(ChunkCompressor):
    """Sends signs, and in tiles of a matrix a size for each row and for each column.

    A gradient of a dense layer or a convolution is a sum of outer products, so its numbers' sizes
    are much like the product of a row's and a column's, which differ by orders of magnitude. One
    size for a block of numbers, or for a column as in the paper, makes momentum lose accuracy.

    What is left out is fed back on the worker and on the chunk's owner: without that it does not
    converge. Columns' sizes are the sums of their numbers' sizes, in 8 bits; those of rows follow
    from them, so that the least is left out.

    Reference:
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs", Interspeech 2014; sizes in factors as those of
        Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
        arXiv:1804.04235.
    """

    def __init__(self) -> None:
        self._rows, self._columns = _ROWS, _COLUMNS
        self._tiled: dict[tuple[int, int], OneBit] = {}

    @property
    def block(self) -> int:
        """The numbers of a tile; see `ChunkCompressor`."""
        return self._rows * self._columns

    @property
    def native(self) -> dict[str, int | str]:
        """What `tfdml.native` calls this; see `ChunkCompressor`."""
        return {"codec": "onebit", "columns": self._columns}

    def parts(self, shapes: Sequence[Sequence[int]]) -> list[tuple[ChunkCompressor, list[int]]]:
        """Returns a codec for each gradient, whose tiles are of its shape."""
        return [(self._of(tuple(shape)), [i]) for i, shape in enumerate(shapes)]

    def _of(self, shape: tuple[int, ...]) -> "OneBit":
        # Whole rows of the matrix one after the other, where they are short.
        columns = shape[-1] * -(-_COLUMNS // shape[-1])
        rows = -(-math.prod(shape) // columns)
        # Few rows are cut into few tiles, so that processes' chunks are not mostly empty.
        tile = min(_ROWS, max(8, rows // 8 // 8 * 8)), columns
        if tile not in self._tiled:
            self._tiled[tile] = OneBit()
            self._tiled[tile]._rows, self._tiled[tile]._columns = tile
        return self._tiled[tile]

    def row_bytes(self, length: int) -> int:
        """Returns the bytes of a row; see `ChunkCompressor`."""
        return length // self.block * (4 * self._rows + self._columns) + length // 8

    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers; see `ChunkCompressor`."""
        rows = values.shape[0]
        tiles = tf.reshape(values, [rows, -1, self._rows, self._columns])
        sizes = tf.abs(tiles)
        largest = largest_or_nan(tf.reshape(values, [rows, -1, self._columns]))
        largest = tf.reshape(largest, [rows, -1, self._rows])
        columns = self._sizes_of_columns(sizes, tf.reduce_max(largest, 2))
        # The rows' sizes for which the sum of the squares of what is left out is the least.
        whole = to_whole(sizes * _inverse(largest, _ONE)[..., None])
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
        """Returns whole numbers from 1 to 255, in proportion to what the columns add up to.

        Args:
            sizes: Of the numbers, shape `[rows, tiles, rows of a tile, columns]`.
            largest: Of each tile's, shape `[rows, tiles]`.
        """
        whole = to_whole(sizes * _inverse(largest, whole_one(self._rows))[..., None, None])
        sums = tf.cast(tf.reduce_sum(whole, 2), tf.float32)
        scale = _MOST / tf.maximum(tf.reduce_max(sums, 2, keepdims=True), 1.0)
        return tf.maximum(to_whole(sums * scale), 1)

    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the numbers that bytes stand for; see `ChunkCompressor`."""
        rows, tiles = payload.shape[0], length // self.block
        ends = [4 * tiles * self._rows, tiles * self._columns, length // 8]
        factors, columns, codes = tf.split(payload, ends, 1)
        factors = tf.reshape(bytes_to_floats(factors, tf.float32), [rows, tiles, self._rows, 1])
        columns = tf.reshape(tf.cast(columns, tf.float32), [rows, tiles, 1, self._columns])
        codes = tf.reshape(unpack(codes, 1, self.block), [rows, tiles, self._rows, self._columns])
        sizes = factors * columns
        return tf.reshape(tf.where(codes > 0, sizes, -sizes), [rows, length])


def _inverse(largest: tf.Tensor, one: float) -> tf.Tensor:
    """Returns what brings the largest numbers to `one`; 0 for what is too small, or not finite."""
    return tf.where(largest > _SMALLEST, one / largest, 0.0)
