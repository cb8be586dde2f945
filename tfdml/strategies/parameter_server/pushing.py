"""Gradients on their way from a worker: encoded there, decoded where they are applied.

A synchronous worker pushes to the chief, an asynchronous one to the servers of the variables.
"""

from typing import Any

import tensorflow as tf

from tfdml.compression import Compressor
from tfdml.compression.compressor import ChunkCompressor
from tfdml.strategies.parameter_server.step_scope import STREAM_STRIDE


def check_compressor(compressor: Compressor | None) -> ChunkCompressor | None:
    """Returns the compressor, if workers can use it.

    What a biased compressor leaves out of a step has to be kept for the next one. A worker that
    dies would take it along, and its steps go to others.

    Raises:
        ValueError: If they cannot.
    """
    if compressor is None:
        return None
    if not isinstance(compressor, ChunkCompressor) or compressor.biased:
        raise ValueError(
            f"`compression` must be right on average, or a rounding, because nothing that a step "
            f"leaves out is kept on a worker, which may be lost. Received: "
            f"compression={compressor!r}. Use Float16(), QSGD(bits=8, stochastic=True), "
            f"NaturalCompression() or TernGrad()."
        )
    return compressor


def is_taken(compressor: ChunkCompressor, gradient: Any) -> bool:
    """Returns whether a gradient is worth encoding: dense, of a known shape, and large enough."""
    known = tf.is_tensor(gradient) and gradient.shape.is_fully_defined()
    return known and compressor.takes(gradient.shape, gradient.dtype)


def new_seed(stream: tf.Tensor) -> tf.Tensor:
    """Returns what a step's stochastic roundings follow from: int32, shape `[2]`.

    Args:
        stream: The worker's, or the share's: the roundings of two must not be the same, or their
            errors would add up.
    """
    drawn = tf.random.uniform([2], maxval=1 << 30, dtype=tf.int32)
    return drawn + tf.cast(stream, tf.int32) * STREAM_STRIDE


def encoded(compressor: ChunkCompressor, gradient: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns a gradient's bytes: uint8, shape `[1, bytes]`."""
    numbers = tf.reshape(tf.cast(gradient, tf.float32), [1, -1])
    numbers = tf.pad(numbers, [[0, 0], [0, -numbers.shape[1] % compressor.block]])
    return compressor.encode(numbers, seed)


def decoded(
    compressor: ChunkCompressor, payload: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType
) -> tf.Tensor:
    """Returns the gradient that bytes stand for.

    Args:
        compressor: What encoded it.
        payload: What `encoded` returned.
        shape: The gradient's shape.
        dtype: The gradient's dtype.
    """
    size = tf.TensorShape(shape).num_elements()
    padded = size + -size % compressor.block
    numbers = compressor.decode(payload, padded)[0, :size]
    return tf.cast(tf.reshape(numbers, shape), dtype)


def sent_to_servers(
    compressor: ChunkCompressor, grads_and_vars: list[tuple[Any, tf.Variable]], stream: tf.Tensor
) -> list[tuple[Any, tf.Variable]]:
    """Returns gradients as their variables' servers have them, in the graph of a worker's step.

    Args:
        compressor: What encodes them.
        grads_and_vars: As the worker has them.
        stream: The worker's.
    """
    seed = new_seed(stream)
    sent = []
    for i, (gradient, variable) in enumerate(grads_and_vars):
        if is_taken(compressor, gradient):
            payload = encoded(compressor, gradient, seed + i)
            with tf.device(variable.device):
                gradient = decoded(compressor, payload, gradient.shape, gradient.dtype)
        sent.append((gradient, variable))
    return sent
