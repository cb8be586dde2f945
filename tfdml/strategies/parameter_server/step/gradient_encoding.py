"""Compression of gradients that a worker sends: encoded there, decoded where they are applied.

A synchronous worker sends them to the chief, an asynchronous one to the variables' servers.
"""

from typing import Any

import tensorflow as tf

from tfdml.compression import Compressor
from tfdml.compression.compressor import ChunkCompressor
from tfdml.strategies.parameter_server.step.step_scope import STREAM_STRIDE


def check_compressor(compressor: Compressor | None) -> ChunkCompressor | None:
    """Returns the compressor if workers can use it.

    A biased compressor needs error feedback: its residual has to be kept for the next step. A
    worker that dies would lose its residual, and its steps go to other workers.

    Raises:
        ValueError: If workers cannot use it.
    """
    if compressor is None:
        return None
    if not isinstance(compressor, ChunkCompressor) or compressor.biased:
        raise ValueError(
            f"`compression` must be unbiased, or a rounding, because workers, "
            f"which may be lost, keep no residual for the next step. Received: "
            f"compression={compressor!r}. Use Float16(), QSGD(bits=8, stochastic=True), "
            f"NaturalCompression() or TernGrad()."
        )
    return compressor


def is_encoded(compressor: ChunkCompressor, gradient: Any) -> bool:
    """Returns whether a gradient is to be encoded: dense, of a known shape, and large enough."""
    known = tf.is_tensor(gradient) and gradient.shape.is_fully_defined()
    return known and compressor.takes(gradient.shape, gradient.dtype)


def new_seed(stream: tf.Tensor) -> tf.Tensor:
    """Returns a seed for a step's stochastic rounding: int32, shape `[2]`.

    Args:
        stream: Random stream of the worker or share. Two of them must not round in the same way, or
            their errors would add up.
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
    """Returns the gradient decoded from bytes.

    Args:
        compressor: Compressor that encoded the gradient.
        payload: Result of `encoded`.
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
    """Sends gradients, encoded, to their variables' servers, in the graph of a worker's step.

    Args:
        compressor: Compressor of the gradients.
        grads_and_vars: Pairs of a gradient and its variable, on the worker.
        stream: The worker's random stream.

    Returns:
        The pairs, with the gradients decoded on the servers.
    """
    seed = new_seed(stream)
    sent = []
    for i, (gradient, variable) in enumerate(grads_and_vars):
        if is_encoded(compressor, gradient):
            payload = encoded(compressor, gradient, seed + i)
            with tf.device(variable.device):
                gradient = decoded(compressor, payload, gradient.shape, gradient.dtype)
        sent.append((gradient, variable))
    return sent
