"""Gradients on their way from a worker to the chief: encoded there, decoded here."""

from typing import Any

import tensorflow as tf

from tfdml.compression import Compressor
from tfdml.compression.compressor import ChunkCompressor


def check_compressor(compressor: Compressor | None, synchronous: bool) -> ChunkCompressor | None:
    """Returns the compressor, if workers can use it.

    What a biased compressor leaves out of a step has to be kept for the next one. A worker that
    dies would take it along, and its steps go to others.

    Raises:
        ValueError: If they cannot.
    """
    if compressor is None:
        return None
    if not synchronous:
        raise ValueError(
            f"`compression` must be None without `synchronous=True`: asynchronous workers push to "
            f"the servers themselves, which decode nothing. Received: "
            f"compression={compressor!r}. Leave it out, or train synchronously."
        )
    if not isinstance(compressor, ChunkCompressor) or compressor.biased:
        raise ValueError(
            f"`compression` must be right on average, or a rounding, because nothing that a step "
            f"leaves out is kept on a worker, which may be lost. Received: "
            f"compression={compressor!r}. Use Float16(), QSGD(bits=8, stochastic=True), "
            f"NaturalCompression() or TernGrad()."
        )
    return compressor


def is_taken(compressor: ChunkCompressor, gradient: Any) -> bool:
    """Returns whether a gradient is worth encoding: dense, and large enough."""
    return tf.is_tensor(gradient) and compressor.takes(gradient.shape, gradient.dtype)


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
