"""Sums of encoded gradients in two levels: float32 within a host, encoded between hosts."""

import zlib
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import Scales, State
from tfdml.compression.exchange.host_part import HostPart
from tfdml.compression.exchange.two_phase import (
    exchanged,
    payload_bytes,
    put,
    stages,
)


class HostGroups:
    """The subgroups of a rank: the ranks of its host, and its peers on all hosts.

    Args:
        collective: Collective between all processes.
        hosts: Hosts and their ranks.
    """

    def __init__(self, collective: Collective, hosts: Hosts):
        self.hosts, self.rank = hosts, collective.rank
        self.local = collective.subgroup(hosts.local_ranks(self.rank))
        self.across = collective.subgroup(hosts.peers(self.rank))
        self.index = hosts.local_index(self.rank)
        self.is_owner = self.index < hosts.owners

    def part(
        self, codec: ChunkCompressor, names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> HostPart:
        """Returns how some gradients of a bucket are divided.

        Args:
            codec: The gradients' codec.
            names: Paths of their variables.
            shapes: Their shapes.
        """
        return HostPart(
            tuple(names),
            tuple(tuple(shape) for shape in shapes),
            self.hosts.count,
            self.hosts.owners,
            codec.block,
        )


def can_sum_by_hosts(compressor: ChunkCompressor, hosts: Hosts) -> bool:
    """Returns whether a codec's gradients can be summed in two levels.

    Args:
        compressor: The codec.
        hosts: Hosts and their ranks.
    """
    # A rank that owns nothing must know how many bytes the owners of its host will give it.
    known = compressor.static or hosts.are_even
    return hosts.have_two_levels and known and compressor.memory(hosts.count).elementwise


def sum_by_hosts(
    groups: HostGroups,
    compressor: ChunkCompressor,
    gradients: Sequence[tf.Tensor],
    states: Sequence[State],
    servers: Sequence[State],
    scales: Scales,
    step: tf.Tensor,
    name: str,
) -> tuple[list[tf.Tensor], tf.Tensor, list[State], list[State]]:
    """Sums a bucket of gradients over all processes, encoded only between hosts.

    On each host, every owner sums its slice of all local gradients in float32. It encodes the sum
    and adds it up with its peers, as `sum_in_two_phases` does. The encoded sums are then given to
    all ranks of the host. So 2(H-1)/H of the encoded bucket leaves a host, however many ranks it
    has, and each host encodes it once.

    Args:
        groups: This rank's subgroups.
        compressor: The encoding.
        gradients: This process's gradients.
        states: State of the compressor's memory for this rank's slice of each part.
        servers: State of the chunk that this rank owns of each part.
        scales: The step's factors.
        step: The step, which seeds the random numbers: int32, shape `[]`.
        name: Prefix of the exchanges' names.

    Returns:
        The sums, bitwise identical on all processes; whether all of them are finite; the new
        states; and the new `servers`.

    Reference:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", arXiv:2306.10209, section 3.3.
    """
    parts = [
        _Part(groups, codec, indices, gradients, step, f"{name}/{number}")
        for number, (codec, indices) in enumerate(compressor.parts([g.shape for g in gradients]))
    ]
    received = exchanged(groups.local.all_to_all, [p.slices() for p in parts], f"{name}/within")
    if groups.is_owner:
        encoded, states, servers = _summed_across(
            groups, parts, received, states, servers, scales, name
        )
    else:
        encoded = _nothing(groups, parts, received, name)
    gathered = exchanged(groups.local.all_gather, encoded, f"{name}/to_host")
    sums: list[tf.Tensor] = [None] * len(gradients)
    finite = []
    for part, payload in zip(parts, gathered, strict=True):
        found, good = part.decode(payload, scales.loss)
        finite.append(good)
        put(found, part.indices, sums)
    return sums, tf.reduce_all(tf.stack(finite)), list(states), list(servers)


def _summed_across(
    groups: HostGroups,
    parts: Sequence["_Part"],
    received: Sequence[tf.Tensor],
    states: Sequence[State],
    servers: Sequence[State],
    scales: Scales,
    name: str,
) -> tuple[list[tf.Tensor], list[State], list[State]]:
    """Sums this owner's slices with its peers'.

    Returns:
        For each part the encoded chunks of the sum: uint8, shape `[H, bytes]`; the new states; and
        the new `servers`.
    """
    encoded, after = [], []
    for part, own, state in zip(parts, received, states, strict=True):
        payload, (new,) = part.encode([tf.reduce_sum(own, 0)], [state], *scales, part.seed)
        encoded.append(payload)
        after.append({key: part.without_padding(value) for key, value in new.items()})
    from_peers = exchanged(groups.across.all_to_all, encoded, f"{name}/to_owner")
    added = [
        part.add(own, server, scales.memory, part.layout.chunk, part.seed + tf.constant([0, 1]))
        for part, own, server in zip(parts, from_peers, servers, strict=True)
    ]
    sums, servers_after = zip(*added, strict=True)
    gathered = exchanged(groups.across.all_gather, sums, f"{name}/to_all")
    rows = [
        tf.ensure_shape(payload, [groups.across.size, own.shape[1]])
        for payload, own in zip(gathered, sums, strict=True)
    ]
    return rows, after, list(servers_after)


def _nothing(
    groups: HostGroups, parts: Sequence["_Part"], received: Sequence[tf.Tensor], name: str
) -> list[tf.Tensor]:
    """Takes part in the exchanges between owners without owning anything; returns no rows."""
    # Transports may need a call of each rank of the job, also of those without peers. Each call
    # gets a value of the one before: Horovod's operations on constants would be executed when the
    # graph is optimized.
    own = tf.cast(received[0][:1, :1], tf.uint8)
    own = groups.across.all_to_all(own, f"{name}/to_owner")
    own = groups.across.all_gather(own, f"{name}/to_all")
    none = tf.minimum(tf.cast(own[0, 0], tf.int32), 0)
    columns = [payload_bytes(part.codec, part.layout.chunk) for part in parts]
    return [tf.ensure_shape(tf.zeros([none, n], tf.uint8), [None, n]) for n in columns]


class _Part:
    """Gradients of a bucket that are encoded together, with their codec's stages."""

    def __init__(self, groups, codec, indices, gradients, step, name):
        self.codec, self.indices, self.own = codec, indices, [gradients[i] for i in indices]
        self.layout = groups.part(codec, [""] * len(indices), [g.shape for g in self.own])
        self._local_ranks, self._index = groups.local.size, groups.index
        hosts, owners = self.layout.hosts, self.layout.owners
        self.encode, self.add, _ = stages(codec, hosts)
        _, _, self._decode = stages(codec, hosts * owners)
        # Each part, rank, step and phase has its own random numbers.
        salt = zlib.crc32(name.encode()) % 2**19 * 2048 + 2 * groups.rank
        self.seed = tf.stack([step, tf.constant(salt)])

    def slices(self) -> tf.Tensor:
        """Returns a slice for each rank of this host, zeros for a rank that owns nothing."""
        length = self.layout.slice_length
        flat = tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in self.own], 0)
        padded = tf.pad(flat, [[0, self._local_ranks * length - self.layout.length]])
        return tf.reshape(padded, [self._local_ranks, length])

    def without_padding(self, values: tf.Tensor) -> tf.Tensor:
        """Returns what is kept of the slice, with zeros for the padding at the bucket's end."""
        length = self.layout.slice_length
        present = min(length, max(0, self.layout.length - self._index * length))
        return tf.pad(values[:present], [[0, length - present]]) if present < length else values

    def decode(self, payload: tf.Tensor, scale: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the sums of the gradients, and whether all of them are finite."""
        rows = self.layout.hosts * self.layout.owners
        payload = tf.ensure_shape(payload, [rows, payload.shape[1]])
        return self._decode(payload, self.layout.shapes, tuple(g.dtype for g in self.own), scale)
