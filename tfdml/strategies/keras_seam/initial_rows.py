"""Initial values of some of a table's rows, without making the whole table."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.random.seed_generator import draw_seed

from tfdml.collectives.row_deal import RowDeal

# Numbers of a table that are drawn at a time.
BLOCK = 1 << 22
# Initializers that give all rows the same values, whatever the shape.
ALIKE = (keras.initializers.Zeros, keras.initializers.Ones)
# Numbers of each dtype that a step of TensorFlow's counter gives.
_PER_COUNT = {tf.float32: 4, tf.float64: 2}
# Steps of the counter that a truncated normal distribution reserves for a number, because it draws
# again what is too large.
_RESERVED = 64


class OwnRows:
    """Initializer of a rank's rows, which have the values that they have in the whole table.

    Args:
        whole: Initializer of the whole table.
        deal: The division of the table.
        rank: This process's rank.
    """

    def __init__(self, whole: Callable, deal: RowDeal, rank: int):
        self.whole, self._deal, self._rank = whole, deal, rank

    def __call__(self, shape: Any, dtype: Any = None) -> tf.Tensor:
        """Returns the rows.

        Args:
            shape: The shape of the rank's part.
            dtype: The table's dtype.
        """
        if isinstance(self.whole, ALIKE):
            return self.whole(shape, dtype)
        dtype = tf.as_dtype(dtype or keras.config.floatx())
        draw = row_draw(self.whole, self._deal.shape, dtype)
        if draw is None:
            whole = keras.ops.convert_to_tensor(self.whole(self._deal.shape, dtype.name))
            return self._deal.part_of(whole, self._rank)
        return tf.concat(list(self._blocks(draw)), 0)

    def _blocks(self, draw: Callable[[int, int], tf.Tensor]) -> Iterator[tf.Tensor]:
        """Yields the rank's rows of each block of rows."""
        (count, width), ranks = self._deal.shape, self._deal.ranks
        # Blocks begin at a row of rank 0, and at a step of the counter.
        unit = math.lcm(ranks, *_PER_COUNT.values())
        step = max(unit, BLOCK // width // unit * unit)
        for first in range(0, count, step):
            yield draw(first, min(step, count - first))[self._rank :: ranks]


def row_draw(
    initializer: Callable, shape: Sequence[int], dtype: tf.DType
) -> Callable[[int, int], tf.Tensor] | None:
    """Returns a function that draws some rows of a matrix, as they are in the whole one.

    Keras's uniform, normal, truncated normal and variance scaling distributions can be drawn so.

    Args:
        initializer: The matrix's initializer.
        shape: The matrix's shape.
        dtype: Its dtype.

    Returns:
        Function of the first row and the number of rows; None if the whole matrix must be made.
    """
    draw = _draw(initializer, tuple(shape)) if len(shape) == 2 else None
    if draw is None or dtype not in _PER_COUNT:
        return None
    per_count, width = _PER_COUNT[dtype], shape[1]
    # As Keras passes it to TensorFlow.
    seed = tf.cast(tf.math.floormod(draw_seed(initializer.seed), tf.int32.max - 1), tf.int32)

    def rows(first: int, count: int) -> tf.Tensor:
        # From a row that begins at a step of the counter.
        begin = first // per_count * per_count
        number = first - begin + count
        return draw([number, width], begin * width // per_count, seed, dtype)[first - begin :]

    return rows


def with_seed(initializer: Callable, seed: int) -> Callable:
    """Returns an initializer with another seed, if it has one that is a number."""
    if not isinstance(getattr(initializer, "seed", None), int):
        return initializer
    initializer = copy.copy(initializer)
    initializer.seed = seed
    return initializer


def _draw(initializer: Callable, shape: tuple[int, int]) -> Callable | None:
    """Returns the function that draws some rows of a matrix; None if there is no such function.

    Args:
        initializer: The matrix's initializer.
        shape: The matrix's shape.
    """
    kinds = keras.initializers
    if type(initializer) is kinds.RandomUniform:
        return _uniform(initializer.minval, initializer.maxval)
    if type(initializer) is kinds.RandomNormal:
        return _normal(initializer.mean, initializer.stddev)
    if type(initializer) is kinds.TruncatedNormal:
        return _truncated_normal(initializer.mean, initializer.stddev)
    if isinstance(initializer, kinds.VarianceScaling) and not initializer.input_axes:
        return _scaled(initializer, shape)
    return None


def _scaled(initializer: keras.initializers.VarianceScaling, shape: tuple[int, int]) -> Callable:
    fans = {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": sum(shape) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return _uniform(-limit, limit)
    if initializer.distribution == "untruncated_normal":
        return _normal(0.0, math.sqrt(variance))
    # The standard deviation of a normal distribution that is cut at 2.
    return _truncated_normal(0.0, math.sqrt(variance) / 0.87962566103423978)


# -- Distributions ------------------------------------------------------------------------------


def _uniform(low: float, high: float) -> Callable:
    def draw(shape: list[int], count: int, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        drawn = tf.raw_ops.StatelessRandomUniformV2(shape=shape, **_at(seed, count), dtype=dtype)
        low_, high_ = tf.cast(low, dtype), tf.cast(high, dtype)
        return drawn * (high_ - low_) + low_

    return draw


def _normal(mean: float, deviation: float) -> Callable:
    def draw(shape: list[int], count: int, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        drawn = tf.raw_ops.StatelessRandomNormalV2(shape=shape, **_at(seed, count), dtype=dtype)
        return drawn * tf.constant(deviation, dtype) + tf.constant(mean, dtype)

    return draw


def _truncated_normal(mean: float, deviation: float) -> Callable:
    def draw(shape: list[int], count: int, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        drawn = tf.raw_ops.StatelessTruncatedNormalV2(
            shape=shape, **_at(seed, count * _PER_COUNT[dtype] * _RESERVED), dtype=dtype
        )
        return drawn * tf.constant(deviation, dtype) + tf.constant(mean, dtype)

    return draw


def _at(seed: tf.Tensor, count: int) -> dict[str, Any]:
    """Returns the arguments with which TensorFlow draws from a later step of a seed's counter."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    low = counter[0] + tf.constant(count, tf.uint64)
    return {"key": key, "counter": tf.stack([low, counter[1]]), "alg": 1}  # Philox.
