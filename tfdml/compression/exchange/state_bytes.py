"""Bytes of the state that a compressing aggregator keeps, by name, without creating it."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients
from tfdml.compression.compressor import ChunkCompressor, Compressor
from tfdml.compression.error_feedback import State
from tfdml.compression.exchange.native_stages import chunk_length
from tfdml.compression.exchange.redistribution import CHUNK_LAYOUT, OWNER_RESIDUAL


def state_bytes(
    compressor: Compressor,
    size: int,
    plain: StepGradients,
    buckets: Sequence[StepGradients],
    label: str,
    owners_keep: bool = True,
) -> dict[str, int]:
    """Returns the bytes of an optimizer's state on a rank, by the names of its variables.

    Args:
        compressor: The compressor.
        size: The number of ranks.
        plain: The gradients that are not compressed.
        buckets: The gradients that are compressed, in the buckets in which they are sent.
        label: Name of the optimizer's exchanges, with their prefix.
        owners_keep: Whether a chunk's owner encodes its sum, and keeps the error.
    """
    memory = compressor.memory(size)
    found: dict[str, int] = {}
    if compressor.biased and plain.factors().learning_rate is not None:
        found[f"learning_rate/{plain.label}"] = tf.float32.size
    for name, gradient in zip(plain.names, plain.values, strict=True):
        found |= _of_gradient(name, memory.init_plain, gradient.shape)
    if buckets or found:
        found["step"] = tf.int32.size
    for bucket in buckets:
        for name, gradient in zip(bucket.names, bucket.values, strict=True):
            found |= _of_gradient(name, memory.init, gradient.shape)
        if isinstance(compressor, ChunkCompressor):
            if owners_keep:
                found |= _of_owner(compressor, size, bucket, label)
        else:
            for name, gradient in zip(bucket.names, bucket.values, strict=True):
                found |= _of_gradient(name, compressor.init, name, gradient.shape)
    return found


def _of_owner(
    compressor: ChunkCompressor, size: int, bucket: StepGradients, label: str
) -> dict[str, int]:
    """Returns the residuals of the chunks that a rank owns of a bucket, and their layout."""
    found: dict[str, int] = {}
    for codec, indices in compressor.parts([g.shape for g in bucket.values]):
        if codec.biased:
            name = f"{label}/{bucket.names[indices[0]]}"
            length = sum(bucket.values[i].shape.num_elements() for i in indices)
            chunk = chunk_length(length, size, codec.block)
            found[f"{CHUNK_LAYOUT}{name}"] = 2 * tf.int32.size
            found[f"{OWNER_RESIDUAL}{name}"] = chunk * tf.float32.size
    return found


def _of_gradient(name: str, init: Callable[..., State], *arguments: object) -> dict[str, int]:
    # In a graph that is never run, nothing is allocated.
    with tf.Graph().as_default():
        start = init(*arguments)
    return {f"{key}/{name}": v.shape.num_elements() * v.dtype.size for key, v in start.items()}
