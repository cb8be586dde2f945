"""Cost model of gradient exchanges: link latency and bandwidth, and the codec's speed."""

import dataclasses
from collections.abc import Sequence

from tfdml.collectives.buckets import BUCKET_BYTES, plan_buckets
from tfdml.compression.compressor import ChunkCompressor, Compressor, SummableCompressor
from tfdml.compression.exchange.two_phase import chunk_length

_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Link:
    """Link between the processes.

    Attributes:
        latency: Seconds of an exchange of a tiny tensor, between all ranks.
        bandwidth: Bytes per second that a rank sends in an exchange.
    """

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic and codec work of a rank in one step.

    Attributes:
        sent: Bytes that the rank sends.
        exchanges: The number of collective operations.
        encoded: Bytes of gradients that the codec processes.
    """

    sent: float
    exchanges: int
    encoded: int


def traffic(
    compressor: Compressor | None,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence,
    size: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Traffic:
    """Returns a rank's traffic in one step: it sends 2(N-1)/N of the encoded gradients.

    That holds for a ring all-reduce and for the two phases.

    Args:
        compressor: Compressor of the gradients; None for no compression.
        shapes: The gradients' shapes.
        dtypes: The gradients' dtypes.
        size: The number of ranks, N.
        bucket_bytes: Bytes of gradients that are exchanged together.
    """
    taken = [
        compressor is not None and compressor.takes(s, d)
        for s, d in zip(shapes, dtypes, strict=True)
    ]
    lengths = [_length(s) for s in shapes]
    plain = [n * d.size for n, d, t in zip(lengths, dtypes, taken, strict=True) if not t]
    plain_dtypes = [d for d, t in zip(dtypes, taken, strict=True) if not t]
    payload, exchanges = float(sum(plain)), len(plan_buckets(plain, plain_dtypes, bucket_bytes))
    chosen = [(s, n) for s, n, t in zip(shapes, lengths, taken, strict=True) if t]
    sizes = [_FLOAT * n for _, n in chosen]
    for bucket in plan_buckets(sizes, ["float32"] * len(sizes), bucket_bytes):
        exchanges += 2
        if isinstance(compressor, ChunkCompressor):
            for codec, indices in compressor.parts([chosen[i][0] for i in bucket.indices]):
                total = sum(chosen[bucket.indices[i]][1] for i in indices)
                payload += size * codec.row_bytes(chunk_length(total, size, codec.block))
        elif isinstance(compressor, SummableCompressor):
            payload += sum(compressor.payload_bytes(chosen[i][0]) for i in bucket.indices)
    return Traffic(2 * (size - 1) / size * payload, exchanges, sum(sizes))


def exchange_seconds(traffic: Traffic, link: Link, codec: float) -> float:
    """Returns the predicted seconds of a step's exchange, including encoding and decoding.

    Buckets overlap: one is encoded while another is on the wire. So the longer of both times counts
    in full, and the shorter one for a single bucket.

    Args:
        traffic: Traffic and codec work of the step.
        link: Link between the ranks.
        codec: The codec's seconds per byte of gradients.
    """
    wire = traffic.sent / link.bandwidth + traffic.exchanges * link.latency
    compute = traffic.encoded * codec
    buckets = max(1, traffic.exchanges // 2)
    return max(wire, compute) + min(wire, compute) / buckets


def _length(shape: Sequence[int]) -> int:
    length = 1
    for n in shape:
        length *= n
    return length
