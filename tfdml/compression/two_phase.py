"""Summing what cannot be summed on the wire: to each chunk's owner, and from there to all."""

import functools
import zlib
from collections.abc import Callable

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.compression.compressor import ChunkCompressor

# Payloads are padded to this, for transports that carry whole words only.
_WORD = 8


def sum_in_two_phases(
    collective: Collective,
    compressor: ChunkCompressor,
    flat: tf.Tensor,
    chunk: int,
    server_residual: tf.Tensor | None,
    step: tf.Tensor,
    name: str,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Sums a vector over all processes.

    Each process owns a chunk of the vector: it is sent everybody's, encoded, adds what they stand
    for, and sends the encoded sum to all. So a process sends 2(N-1)/N of the encoded vector.

    Args:
        collective: What moves the bytes, between N processes.
        compressor: The encoding.
        flat: This process's vector: float32, shape `[n]`.
        chunk: The length of a chunk, at least n / N, a multiple of the compressor's block.
        server_residual: What the owner's encoding has left out so far: float32, shape `[chunk]`;
            None if it is not fed back.
        step: What random numbers follow from: int32, shape `[]`.
        name: What the exchanges are called.

    Returns:
        The sum, shape `[n]`, the same bits on all processes; what of `flat` was sent, shape `[n]`;
        and the new `server_residual`.
    """
    size, length = collective.size, flat.shape[0]
    rows = tf.reshape(tf.pad(flat, [[0, size * chunk - length]]), [size, chunk])
    # Other random numbers for each bucket, rank, step and phase.
    salt = zlib.crc32(name.encode()) % 2**19 * 2048 + 2 * collective.rank
    first = tf.stack([step, tf.constant(salt)])
    payload = _encode(compressor, rows, first)
    sent = tf.reshape(_decode(compressor, payload, chunk), [-1])[:length]
    arrived = collective.all_to_all(_padded(payload), f"{name}/to_owner")
    total = tf.reduce_sum(_decode(compressor, arrived[:, : payload.shape[1]], chunk), 0)
    if server_residual is not None:
        total += server_residual
    encoded = _encode(compressor, total[None, :], first + tf.constant([0, 1]))
    left = None
    if server_residual is not None:
        left = total - _decode(compressor, encoded, chunk)[0]
    everyones = collective.all_gather(_padded(encoded), f"{name}/to_all")
    everyones = tf.ensure_shape(everyones, [size, None])[:, : encoded.shape[1]]
    everyones = tf.ensure_shape(everyones, [size, encoded.shape[1]])
    return tf.reshape(_decode(compressor, everyones, chunk), [-1])[:length], sent, left


def _encode(compressor: ChunkCompressor, rows: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return _fused(compressor)[0](rows, seed)


def _decode(compressor: ChunkCompressor, payload: tf.Tensor, length: int) -> tf.Tensor:
    return _fused(compressor)[1](payload, length)


@functools.cache
def _fused(compressor: ChunkCompressor) -> tuple[Callable, Callable]:
    """Returns `encode` and `decode` compiled by XLA: numbers are read and written once."""
    return tuple(tf.function(f, jit_compile=True) for f in (compressor.encode, compressor.decode))


def _padded(payload: tf.Tensor) -> tf.Tensor:
    return tf.pad(payload, [[0, 0], [0, -payload.shape[1] % _WORD]])
