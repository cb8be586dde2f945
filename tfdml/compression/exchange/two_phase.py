"""Sums of encoded gradients in two phases: each chunk to its owner, then its sum to all ranks."""

import functools
import math
import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import Scales, State, compensated
from tfdml.compression.exchange.native_stages import NativeStages, chunk_length, operations

# Payloads are padded to a multiple of this many bytes, because some transports carry words.
_WORD = 8


def sum_in_two_phases(
    collective: Collective,
    compressor: ChunkCompressor,
    gradients: Sequence[tf.Tensor],
    states: Sequence[State],
    servers: Sequence[State],
    scales: Scales,
    step: tf.Tensor,
    name: str,
) -> tuple[list[tf.Tensor], tf.Tensor, list[State], list[State]]:
    """Sums a bucket of gradients over all processes.

    Each process owns a chunk of the bucket: it receives that chunk, encoded, from all processes,
    adds up the decoded values and sends the encoded sum to all. So a process sends 2(N-1)/N of the
    encoded bucket.

    Args:
        collective: Collective that moves tensors between N processes.
        compressor: The encoding.
        gradients: This process's gradients.
        states: State of the compressor's memory for each gradient.
        servers: State of the owned chunk, for each of the compressor's parts.
        scales: The step's factors.
        step: The step, which seeds the random numbers: int32, shape `[]`.
        name: Prefix of the exchanges' names.

    Returns:
        The sums, bitwise identical on all processes; whether all of them are finite; the new
        states; and the new `servers`.
    """
    parts = [
        _Part(collective, codec, indices, gradients, step, f"{name}/{number}")
        for number, (codec, indices) in enumerate(compressor.parts([g.shape for g in gradients]))
    ]
    states, payloads = list(states), []
    for part in parts:
        payload, after = part.encode(
            part.own, [states[i] for i in part.indices], *scales, part.seed
        )
        payloads.append(payload)
        put(after, part.indices, states)
    received = exchanged(collective.all_to_all, payloads, f"{name}/to_owner")
    added = [
        part.add(own, server, scales.memory, part.chunk, part.seed + tf.constant([0, 1]))
        for part, own, server in zip(parts, received, servers, strict=True)
    ]
    encoded, servers = zip(*added, strict=True)
    gathered = exchanged(collective.all_gather, encoded, f"{name}/to_all")
    sums: list[tf.Tensor] = [None] * len(gradients)
    finite = []
    for part, payload, own in zip(parts, gathered, encoded, strict=True):
        payload = tf.ensure_shape(payload, [collective.size, own.shape[1]])
        shapes = tuple(tuple(g.shape.as_list()) for g in part.own)
        found, good = part.decode(payload, shapes, tuple(g.dtype for g in part.own), scales.loss)
        finite.append(good)
        put(found, part.indices, sums)
    return sums, tf.reduce_all(tf.stack(finite)), states, list(servers)


class _Part:
    """Gradients of a bucket that are encoded as one row of values, with their codec's stages."""

    def __init__(self, collective, codec, indices, gradients, step, name):
        self.indices, self.own = indices, [gradients[i] for i in indices]
        self.encode, self.add, self.decode = stages(codec, collective.size)
        self.chunk = chunk_length(_total(self.own), collective.size, codec.block)
        self.seed = seed_of(step, collective.rank, name)


def seed_of(step: tf.Tensor, rank: int, name: str) -> tf.Tensor:
    """Returns a rank's seed of a part's random numbers: int32, `[2]`; the next one is free, too.

    Args:
        step: The step: int32, shape `[]`.
        rank: The rank.
        name: The part's name.
    """
    # Each part, rank, step and phase has its own random numbers.
    salt = zlib.crc32(name.encode()) % 2**19 * 2048 + 2 * rank
    return tf.stack([step, tf.constant(salt)])


def exchanged(exchange: Callable, payloads: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Exchanges the parts' rows of bytes as one tensor and returns the received rows by part."""
    if len(payloads) == 1:
        return [exchange(payloads[0], name)]
    return tf.split(exchange(tf.concat(payloads, 1), name), [p.shape[1] for p in payloads], 1)


def put(values: Sequence, indices: Sequence[int], into: list) -> None:
    """Puts values into the given positions of a list."""
    for i, value in zip(indices, values, strict=True):
        into[i] = value


def encoder(compressor: ChunkCompressor, size: int) -> Callable:
    """Returns the stage before the first exchange among `size` processes."""
    return stages(compressor, size)[0]


@functools.cache
def stages(compressor: ChunkCompressor, size: int) -> tuple[Callable, Callable, Callable]:
    """Returns the stages before, between and after the exchanges."""
    library = operations(compressor, size)
    if library is None:
        return compiled_stages(compressor, size)
    native = NativeStages(library, compressor, size, _WORD)
    return native.encode, native.add, native.decode


def compiled_stages(compressor: ChunkCompressor, size: int) -> tuple[Callable, Callable, Callable]:
    """Returns the stages in TensorFlow operations.

    XLA compiles them, so that values are read and written once however many operations there are:
    each stage as a whole where shapes are static, else only the parts around the encoding.
    """
    memory = compressor.memory(size)
    compiled = functools.partial(tf.function, jit_compile=True)

    @compiled
    def before(gradients, states, scale, memory_scale):
        values, middles = compensated(memory, gradients, states, scale, memory_scale)
        length = _total(values)
        chunk = chunk_length(length, size, compressor.block)
        flat = tf.pad(_joined(values), [[0, size * chunk - length]])
        return values, middles, tf.reshape(flat, [size, chunk])

    @compiled
    def after(values, middles, sent):
        flat = tf.reshape(sent, [-1])[: _total(values)]
        parts = _parted(flat, [v.shape for v in values])
        return [memory.update(*each) for each in zip(values, parts, middles, strict=True)]

    @compiled
    def residual(total, encoded):
        return total - encoded

    @compiled
    def added(total, server, memory_scale):
        for residual in server.values():
            total += residual * memory_scale
        return total

    @compiled
    def results(total, scale, shapes, dtypes):
        total = tf.reshape(total, [-1])[: sum(map(math.prod, shapes))] * scale
        sums = [tf.cast(p, d) for p, d in zip(_parted(total, shapes), dtypes, strict=True)]
        return sums, tf.reduce_all(tf.math.is_finite(total))

    def encode(gradients, states, scale, memory_scale, seed):
        values, middles, rows = before(gradients, states, scale, memory_scale)
        payload = compressor.encode(rows, seed)
        states = after(values, middles, compressor.decode(payload, rows.shape[1]))
        return padded(compressor, payload), states

    def add(received, server, memory_scale, chunk, seed):
        total = compressor.decode_sum(unpadded(compressor, received, chunk), chunk)
        total = added(total, server, memory_scale)
        encoded = compressor.encode(total[None, :], seed)
        states = {key: residual(total, compressor.decode(encoded, chunk)[0]) for key in server}
        return padded(compressor, encoded), states

    def decode(gathered, shapes, dtypes, scale):
        chunk = chunk_length(sum(map(math.prod, shapes)), size, compressor.block)
        total = compressor.decode(unpadded(compressor, gathered, chunk), chunk)
        return results(total, scale, shapes, dtypes)

    three = (encode, add, decode)
    return tuple(compiled(f) for f in three) if compressor.static else three


def _total(tensors: Sequence[tf.Tensor]) -> int:
    return sum(t.shape.num_elements() for t in tensors)


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def _parted(flat: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    parts = tf.split(flat, [math.prod(shape) for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def payload_bytes(compressor: ChunkCompressor, length: int) -> int:
    """Returns the bytes that are sent for a row of `length` values, if that follows from it."""
    size = compressor.row_bytes(length)
    return size + -size % _WORD


def padded(compressor: ChunkCompressor, payload: tf.Tensor) -> tf.Tensor:
    """Returns encoded rows, padded to whole words if their size is known."""
    if not compressor.static:
        return payload
    return tf.pad(payload, [[0, 0], [0, -payload.shape[1] % _WORD]])


def unpadded(compressor: ChunkCompressor, payload: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the encoded rows of `length` values, without padding."""
    return payload[:, : compressor.row_bytes(length)] if compressor.static else payload
