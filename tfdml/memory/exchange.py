"""Bytes of exchanges: what a step's exchange takes, and what is kept from step to step."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdml.collectives.aggregator import StepFactors, StepGradients
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.compression import Auto, Compressor
from tfdml.compression.auto.auto_aggregator import make_aggregator
from tfdml.compression.compressor import ChunkCompressor, SummableCompressor
from tfdml.compression.exchange.two_phase import chunk_length, payload_bytes
from tfdml.memory.step_graph import OptimizerUpdate
from tfdml.strategies.sharded.row_codecs import ROW_CODECS
from tfdml.tensor_memory.graph_nodes import nbytes_of

# Values, decoded values and their sum: copies in float32 of the bucket that is being encoded.
_COPIES = 3


def step_gradients(
    update: OptimizerUpdate, is_divided: Callable[[keras.Variable], bool]
) -> StepGradients:
    """Returns an update's gradients as an exchange gets them.

    Args:
        update: The update.
        is_divided: Whether a variable is a divided table, whose gradients go another way.
    """
    pairs = [
        (g, v)
        for g, v in zip(update.gradients, update.variables, strict=True)
        if g is not None and not is_divided(v)
    ]
    return StepGradients(
        [_with_shape(g, v) for g, v in pairs],
        [f"{v.path}#{i}" for i, (_, v) in enumerate(pairs)],
        f"gradients/{update.optimizer.name}",
        # Optimizers have a rate, whose last value is kept.
        lambda: StepFactors(learning_rate=0.0),
    )


def _with_shape(gradient: tf.Tensor | tf.IndexedSlices, variable: object):
    if not isinstance(gradient, tf.IndexedSlices):
        gradient.set_shape(variable.shape)
        return gradient
    shape = tf.constant(tuple(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def residual_bytes(
    gradients: StepGradients,
    size: int,
    compressor: Compressor | None,
    bucket_bytes: int,
    sharding: bool = False,
) -> int:
    """Returns the bytes that compression keeps on a rank from step to step.

    Args:
        gradients: An optimizer's gradients.
        size: The number of ranks.
        compressor: Their compressor, None for none.
        bucket_bytes: Size of a bucket.
        sharding: Whether optimizer state is divided.
    """
    if size == 1:
        return 0
    collective = LoopbackCollective(size)
    aggregator = make_aggregator(collective, compressor, bucket_bytes, to_owners=sharding)
    return sum(aggregator.state_bytes(gradients).values())


def exchange_bytes(
    gradients: StepGradients, size: int, compressor: Compressor | None, bucket_bytes: int
) -> int:
    """Returns the bytes that a step's exchange takes besides the gradients, if all is in flight.

    That is so where the network is slower than the backward pass: then the last layer's sum is
    still awaited when the first layer's gradient is sent.

    Args:
        gradients: An optimizer's gradients.
        size: The number of ranks.
        compressor: Their compressor, None for none.
        bucket_bytes: Size of a bucket.
    """
    if size == 1:
        return 0
    if isinstance(compressor, Auto):
        own = [None, *compressor.candidates]
        return max(exchange_bytes(gradients, size, c, bucket_bytes) for c in own)
    sparse = [g for g in gradients.values if isinstance(g, tf.IndexedSlices)]
    dense = [g for g in gradients.values if not isinstance(g, tf.IndexedSlices)]
    sums = sum(nbytes_of(g) or 0 for g in dense)
    buckets = make_aggregator(LoopbackCollective(size), compressor, bucket_bytes).buckets(gradients)
    taken = sums + sum(_gathered_bytes(g, size) for g in sparse)
    if compressor is None:
        # Several gradients travel packed into one buffer, which is kept for the next bucket.
        return taken + max((b.nbytes for b in buckets if len(b.indices) > 1), default=0)
    # New residuals replace the old ones only when all sums are known to be finite.
    taken += residual_bytes(gradients, size, compressor, bucket_bytes)
    for bucket in buckets:
        own = [gradients.values[i] for i in bucket.indices]
        if all(compressor.takes(g.shape, g.dtype) for g in own):
            taken += _payload_bytes(compressor, [g.shape.as_list() for g in own], size)
    return taken + _COPIES * max((b.nbytes for b in buckets), default=0)


def rows_exchange_bytes(gradient: tf.IndexedSlices, row_codec: str | None) -> int:
    """Returns the bytes that the exchange of a divided table's gradients takes besides them.

    It is that of as many rows as the rank looks up: it wants each from another rank or itself, and
    as many are asked of it. Rows on the way there take as much, and are given up before.

    Args:
        gradient: The gradient of the rows that the rank looks up.
        row_codec: Name of the encoding of the rows; None for none.
    """
    codec, values = ROW_CODECS[row_codec], gradient.values
    rows = nbytes_of(values)
    if not rows:
        return 0
    encoded = values.shape[0] * nbytes_of(
        codec.encode(tf.zeros((1, values.shape[1]), values.dtype))
    )
    # The sums by row to send, packed with those of other tables, and as they are received. Encoded
    # rows exist before they are packed and after they are unpacked, too.
    return rows + (2 if row_codec is None else 4) * encoded


def _payload_bytes(compressor: Compressor, shapes: Sequence[list[int]], size: int) -> int:
    """Returns the bytes of a bucket's encoded gradients: sent, received, and their sums."""
    if isinstance(compressor, SummableCompressor):
        return 2 * sum(compressor.payload_bytes(shape) for shape in shapes)
    total = 0
    for codec, indices in compressor.parts(shapes):
        total += (3 * size + 1) * _row_bytes(codec, [shapes[i] for i in indices], size)
    return total


def _row_bytes(codec: ChunkCompressor, shapes: Sequence[list[int]], size: int) -> int:
    length = sum(tf.TensorShape(shape).num_elements() for shape in shapes)
    return payload_bytes(codec, chunk_length(length, size, codec.block))


def _gathered_bytes(gradient: tf.IndexedSlices, size: int) -> int:
    """Returns the bytes of all ranks' rows, and of their sums by row."""
    rows = size * sum(nbytes_of(t) or 0 for t in (gradient.values, gradient.indices))
    table = gradient.shape.num_elements() * gradient.values.dtype.size
    return rows + min(rows, table)
