"""Exact selection of the largest values of a row, in one pass over its values."""

import math

import tensorflow as tf

from tfdml import native

# The bits of infinity: values that are not finite count as infinity, so they are chosen first.
_INFINITE = 0x7F800000
# The bits of the smallest normal number.
_NORMAL = 0x00800000
# A row is scanned in this many parts side by side.
_PARTS = 8
# Largest values that a sample should hold, and the safety margin in standard deviations.
_SAMPLED, _DEVIATIONS = 100, 4.0
# Room for values that pass the threshold: a multiple of the wanted number, plus a constant.
_ROOM, _LEAST_ROOM = 2.0, 256
# Values that are counted side by side.
_LANES = 64


def encoded_largest(rows: tf.Tensor, count: tf.Tensor | int, most: int) -> tf.Tensor:
    """Returns the largest values of each row, followed by their indices, as bytes.

    Args:
        rows: float32, shape `[rows, n]`.
        count: Values to choose per row, from 1 to `most`: int32, shape `[]`.
        most: Upper limit of `count`.

    Returns:
        uint8, shape `[rows, 8 * count]`.
    """
    library = native.usable()
    if library is not None:
        values, indices = library.tfdml_largest(rows, count)
        pairs = tf.stack([values, tf.bitcast(indices, tf.float32)], 1)
    else:
        size = None if tf.is_tensor(count) else count

        def chosen(row: tf.Tensor) -> tf.Tensor:
            indices = largest(row, count, most)
            return tf.stack([tf.gather(row, indices), tf.bitcast(indices, tf.float32)])

        pairs = tf.map_fn(chosen, rows, fn_output_signature=tf.TensorSpec([2, size], tf.float32))
    size = -1 if tf.is_tensor(count) else 8 * count
    return tf.reshape(tf.bitcast(pairs, tf.uint8), [rows.shape[0], size])


def decoded_rows(payload: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the rows that `encoded_largest` encoded, with zeros for values that were not sent.

    Args:
        payload: uint8, shape `[rows, 8 * count]`.
        length: Values per row.
    """
    library = native.usable()
    if library is not None:
        return library.tfdml_spread(payload, length, sum=False)
    values, indices = _pairs(payload)
    rows = tf.shape(payload)[0]
    begins = tf.repeat(tf.range(tf.cast(rows, tf.int64)) * length, tf.size(values) // rows)
    flat = begins[:, None] + tf.cast(indices, tf.int64)
    spread = tf.scatter_nd(flat, values, [tf.cast(rows, tf.int64) * length])
    return tf.reshape(spread, [payload.shape[0] or rows, length])


def decoded_sum(payload: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the sum of the decoded rows: float32, shape `[length]`."""
    library = native.usable()
    if library is not None:
        return library.tfdml_spread(payload, length, sum=True)
    values, indices = _pairs(payload)
    return tf.scatter_nd(indices, values, [length])


def _pairs(payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all rows' values, shape `[n]`, and their indices in a row, shape `[n, 1]`.

    Reshaped and sliced as floats: on GPUs, TensorFlow's operations hold int32 on the host.
    """
    pairs = tf.reshape(payload, [tf.shape(payload)[0], 2, -1, 4])
    values, indices = tf.unstack(tf.bitcast(pairs, tf.float32), axis=1)
    return tf.reshape(values, [-1]), tf.bitcast(tf.reshape(indices, [-1, 1]), tf.int32)


def largest(row: tf.Tensor, count: tf.Tensor | int, most: int) -> tf.Tensor:
    """Returns the indices of the largest values of a row, in no particular order.

    A sample gives a threshold that slightly more values pass than are wanted. One pass over the row
    finds them, and the exact limit is searched for among them alone. If the sample was misleading,
    and on GPUs, whose `top_k` keeps everything on the device, `top_k` of the whole row is used.

    Args:
        row: float32, shape `[n]`. Values that are not finite count as the largest.
        count: Values to choose, from 1 to `most`: int32, shape `[]`.
        most: Upper limit of `count`.

    Returns:
        int32, shape `[count]`.
    """
    length = row.shape[0]
    room = int(_ROOM * most) + _LEAST_ROOM
    if tf.config.list_logical_devices("GPU"):
        # As floats, because TensorFlow has no kernel of `top_k` for int32 on GPUs.
        return tf.math.top_k(_ordered_floats(row), count, sorted=False).indices
    if length % _PARTS or room >= length:
        return _of_all(row, count)
    threshold = _likely_threshold(row, count, most)
    width = length // _PARTS
    columns = tf.where(_columns_with(row, threshold))[:, 0]
    sizes = _sizes(tf.gather(tf.reshape(row, [_PARTS, width]), columns, axis=1))
    passed = tf.where(sizes >= threshold)
    indices = tf.cast(passed[:, 0] * width + tf.gather(columns, passed[:, 1]), tf.int32)
    number = tf.size(indices)

    def among() -> tf.Tensor:
        found = tf.gather_nd(sizes, passed)
        padded = tf.pad(found, [[0, room - number]], constant_values=-1)
        limit = _limit(tf.ensure_shape(padded, [room]), count)
        equal = tf.where(found == limit)[:, 0]
        chosen = tf.concat([tf.where(found > limit)[:, 0], equal], 0)[:count]
        return tf.gather(indices, chosen)

    fits = tf.logical_and(number >= count, number <= room)
    return tf.cond(fits, among, lambda: _of_all(row, count))


def _sizes(values: tf.Tensor) -> tf.Tensor:
    """Returns integers in the order of the values' magnitudes: int32, from 0."""
    bits = tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), 0x7FFFFFFF)
    return tf.minimum(bits, _INFINITE)


@tf.function(jit_compile=True)
def _ordered_floats(row: tf.Tensor) -> tf.Tensor:
    """Returns float32 in the order of the values' magnitudes, infinity if they are not finite.

    Magnitudes below the normal numbers, which processors may count as 0, become negative ones.
    """
    sizes = _sizes(row)
    below = tf.constant(-(2**31)) + (2 * _NORMAL - sizes)
    return tf.bitcast(tf.where(sizes < _NORMAL, below, sizes), tf.float32)


def _of_all(row: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
    return tf.math.top_k(_sizes(row), count, sorted=False).indices


def _likely_threshold(row: tf.Tensor, count: tf.Tensor | int, most: int) -> tf.Tensor:
    """Returns a magnitude that most likely at least `count` values reach, and not many more."""
    stride = most // _SAMPLED | 1  # Odd: rows of a matrix have even lengths.
    sample = _sizes(row[::stride])
    part = tf.cast(count, tf.float32) / row.shape[0] * sample.shape[0]
    among = tf.cast(tf.math.ceil(part + _DEVIATIONS * tf.sqrt(part)), tf.int32)
    return _limit(sample, tf.clip_by_value(among, 1, sample.shape[0]))


@tf.function(jit_compile=True)
def _columns_with(row: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Returns which columns have a value of at least that magnitude in one of the row's parts."""
    parts = tf.reshape(row, [_PARTS, -1])
    return tf.reduce_max(_sizes(parts), 0) >= threshold


@tf.function(jit_compile=True)
def _limit(sizes: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
    """Returns the smallest magnitude among the `count` largest, by bisection."""
    lanes = tf.reshape(
        tf.pad(sizes, [[0, -sizes.shape[0] % _LANES]], constant_values=-1), [-1, _LANES]
    )

    def halved(low: tf.Tensor, high: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        middle = low + (high - low + 1) // 2
        counts = tf.reduce_sum(tf.cast(lanes >= middle, tf.int32), 0)
        enough = tf.reduce_sum(counts) >= count
        return tf.where(enough, middle, low), tf.where(enough, high, middle - 1)

    steps = math.ceil(math.log2(_INFINITE + 1))
    start = (tf.constant(0), tf.constant(_INFINITE))
    low, _ = tf.while_loop(
        lambda low, high: True, halved, start, maximum_iterations=steps, back_prop=False
    )
    return low
