"""Cost model of gradient exchanges: latency and bandwidths, and the codec's speed."""

import dataclasses
import math
from collections.abc import Sequence

from tfdml.collectives.buckets import BUCKET_BYTES, plan_buckets
from tfdml.collectives.hosts import Hosts
from tfdml.compression.compressor import ChunkCompressor, Compressor, SummableCompressor
from tfdml.compression.exchange.compressed_buckets import plan_compressed_buckets
from tfdml.compression.exchange.two_phase import chunk_length

_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Link:
    """Connections between the processes.

    Attributes:
        latency: Seconds of an exchange of a tiny tensor, between all ranks.
        bandwidth: Bytes per second that leave a host in an all-to-all.
        local_bandwidth: Bytes per second that a rank sends to the other ranks of its host.
        sum_rate: Bytes of a tensor that an all-reduce sums per second; None for that of a ring over
            the link. It depends on the transport: some sum within hosts first.
    """

    latency: float
    bandwidth: float
    local_bandwidth: float = math.inf
    sum_rate: float | None = None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic and codec work of a host and its ranks in one step.

    Attributes:
        sent: Bytes that leave a host.
        exchanges: The number of collective operations.
        encoded: Bytes of gradients that a rank's codec processes.
        local: Bytes that a rank sends to the other ranks of its host, if gradients are summed by
            hosts.
        summed: Bytes of what all-reduces sum.
        in_rings: Bytes of `sent` that leave a host if these all-reduces are rings.
    """

    sent: float
    exchanges: int
    encoded: int
    local: float = 0.0
    summed: float = 0.0
    in_rings: float = 0.0


def traffic(
    compressor: Compressor | None,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence,
    size: int,
    bucket_bytes: int = BUCKET_BYTES,
    hosts: Hosts | None = None,
    by_hosts: bool = False,
    to_owners: bool = False,
) -> Traffic:
    """Returns a host's traffic in one step.

    A ring all-reduce crosses a host's link once: 2(N-1)/N of the encoded gradients. In the two
    phases, each of a host's L ranks sends the N-L ranks of other hosts a chunk each, and then the
    sums go round the ring: (L(N-L) + N-1)/N, which is the same for L = 1. Summed by hosts, it is
    2(H-1)/H for H hosts. With divided optimizer state only the way to the owners is encoded, and
    the weights come back as they are: at most half of the bytes are saved.

    Args:
        compressor: Compressor of the gradients; None for no compression.
        shapes: The gradients' shapes.
        dtypes: The gradients' dtypes.
        size: The number of ranks, N.
        bucket_bytes: Bytes of gradients that are exchanged together.
        hosts: Hosts and their ranks; None for one rank on each.
        by_hosts: Whether gradients are summed within hosts first.
        to_owners: Whether each gradient is summed only where it is owned.
    """
    taken = [
        compressor is not None and compressor.takes(s, d)
        for s, d in zip(shapes, dtypes, strict=True)
    ]
    lengths = [_length(s) for s in shapes]
    plain = [n * d.size for n, d, t in zip(lengths, dtypes, taken, strict=True) if not t]
    plain_dtypes = [d for d, t in zip(dtypes, taken, strict=True) if not t]
    exchanges = len(plan_buckets(plain, plain_dtypes, bucket_bytes))
    # Bytes that go round a ring, and bytes that are exchanged in two phases.
    ring, chunks = float(sum(plain)), 0.0
    chosen = [(s, n) for s, n, t in zip(shapes, lengths, taken, strict=True) if t]
    sizes = [_FLOAT * n for _, n in chosen]
    buckets = plan_compressed_buckets(compressor, [s for s, _ in chosen], bucket_bytes)
    for bucket in buckets:
        exchanges += 4 if by_hosts else 2
        if isinstance(compressor, ChunkCompressor):
            for codec, indices in compressor.parts([chosen[i][0] for i in bucket.indices]):
                total = sum(chosen[bucket.indices[i]][1] for i in indices)
                chunks += size * codec.row_bytes(chunk_length(total, size, codec.block))
        elif isinstance(compressor, SummableCompressor):
            ring += sum(compressor.payload_bytes(chosen[i][0]) for i in bucket.indices)
    sent = in_rings = 2 * (size - 1) / size * ring
    most = ranks_of_a_host(hosts)
    if to_owners:
        nbytes = [n * d.size for n, d in zip(lengths, dtypes, strict=True)]
        gathers = len(plan_buckets(nbytes, dtypes, bucket_bytes))
        to, back = most * (size - most) / size, (size - 1) / size
        sent = to * (sum(plain) + chunks) + back * sum(nbytes)
        return Traffic(sent, exchanges - len(buckets) + gathers, sum(sizes))
    if by_hosts:
        sent += 2 * (hosts.count - 1) / hosts.count * chunks
        local = (most - 1) / most * (sum(sizes) + chunks)
        return Traffic(sent, exchanges, sum(sizes), local, ring, in_rings)
    sent += (most * (size - most) + size - 1) / size * chunks
    return Traffic(sent, exchanges, sum(sizes), 0.0, ring, in_rings)


def ranks_of_a_host(hosts: Hosts | None) -> int:
    """Returns the number of ranks that share a link, on the host that has most of them.

    Args:
        hosts: Hosts and their ranks. Those of a single host each have a link of their own: its
            memory.
    """
    return 1 if hosts is None or hosts.count == 1 else max(map(len, hosts.ranks))


def exchange_seconds(traffic: Traffic, link: Link, codec: float) -> float:
    """Returns the predicted seconds of a step's exchange, including encoding and decoding.

    Buckets overlap: one is encoded while another is on the wire. So the longer of both times counts
    in full, and the shorter one for a single bucket.

    Args:
        traffic: Traffic and codec work of the step.
        link: Link between the ranks.
        codec: The codec's seconds per byte of gradients.
    """
    wire = wire_seconds(traffic, link)
    compute = traffic.encoded * codec
    buckets = max(1, traffic.exchanges // 2)
    return max(wire, compute) + min(wire, compute) / buckets


def wire_seconds(traffic: Traffic, link: Link) -> float:
    """Returns the predicted seconds of a step's exchange without encoding and decoding.

    Args:
        traffic: Traffic of the step.
        link: Link between the ranks.
    """
    local = traffic.local / link.local_bandwidth
    return transfer_seconds(traffic, link) + local + traffic.exchanges * link.latency


def transfer_seconds(traffic: Traffic, link: Link) -> float:
    """Returns the predicted seconds that a step's bytes take between hosts.

    Args:
        traffic: Traffic of the step.
        link: Link between the ranks.
    """
    if link.sum_rate is None:
        return traffic.sent / link.bandwidth
    return (traffic.sent - traffic.in_rings) / link.bandwidth + traffic.summed / link.sum_rate


def _length(shape: Sequence[int]) -> int:
    length = 1
    for n in shape:
        length *= n
    return length
