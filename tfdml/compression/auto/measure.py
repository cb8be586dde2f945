"""Measurements of the link between the processes and of the codecs, in about a second."""

import functools
import statistics
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.compression.auto.cost_model import Link, ranks_of_a_host
from tfdml.compression.compressor import ChunkCompressor, Compressor
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.rounds import sum_in_rounds
from tfdml.compression.exchange.two_phase import sum_in_two_phases

_REPEATS = 5
# Returns the time in seconds: float64, shape [].
Clock = Callable[[], tf.Tensor]

# A message grows until it takes this long, so that its latency does not count: the queues of a
# slow network swallow the first hundred kilobytes.
_LEAST_SECONDS, _FIRST_BYTES, _MOST_BYTES = 0.1, 1 << 18, 1 << 25
# Bytes of a message within a host.
_LOCAL_BYTES = 1 << 22
_FLOAT = 4
# Codecs are timed on a matrix of 1 MB.
_SHAPE = (512, 512)


def measure_link(
    collective: Collective, clock: Clock = tf.timestamp, hosts: Hosts | None = None
) -> Link:
    """Returns the measured latency and bandwidths, the same on all ranks; a collective call.

    Args:
        collective: Collective between the processes.
        clock: Function that returns the time.
        hosts: Hosts and their ranks; None if that does not matter.
    """
    small = tf.zeros([2])
    _seconds(clock, lambda: collective.all_reduce([small], "link/latency"), 1)
    latency = _seconds(clock, lambda: collective.all_reduce([small], "link/latency"), _REPEATS)
    (latency,) = agreed(collective, [latency])
    size = collective.size

    def all_reduce(nbytes: int) -> object:
        return collective.all_reduce([tf.zeros([nbytes // _FLOAT])], f"link/sum_{nbytes}")

    def all_to_all(nbytes: int) -> object:
        rows = tf.zeros([size, nbytes // _FLOAT // size])
        return collective.all_to_all(rows, f"link/bandwidth_{nbytes}")

    summed, seconds = _large_enough(collective, clock, all_reduce)
    sum_rate = summed / max(seconds - latency, 1e-9)
    nbytes, seconds = _large_enough(collective, clock, all_to_all)
    most = ranks_of_a_host(hosts)
    # Each of a host's ranks sends a row to each rank of the other hosts.
    sent = most * (size - most) / size * nbytes
    bandwidth = sent / max(seconds - latency, 1e-9)
    if hosts is None or not hosts.have_two_levels:
        return Link(latency, bandwidth, sum_rate=sum_rate)
    return Link(latency, bandwidth, _local_bandwidth(collective, clock, hosts), sum_rate)


def _large_enough(
    collective: Collective, clock: Clock, exchange: Callable[[int], object]
) -> tuple[int, float]:
    """Returns the bytes of a message whose latency does not count, and its seconds.

    Args:
        collective: Collective between the processes.
        clock: Function that returns the time.
        exchange: Function that exchanges a message of so many bytes.
    """
    nbytes = _FIRST_BYTES
    while True:
        call = functools.partial(exchange, nbytes)
        _seconds(clock, call, 1)
        seconds = _seconds(clock, call, 2)
        (seconds,) = agreed(collective, [seconds])
        if seconds > _LEAST_SECONDS or nbytes >= _MOST_BYTES:
            return nbytes, seconds
        nbytes *= 4


def _local_bandwidth(collective: Collective, clock: Clock, hosts: Hosts) -> float:
    """Returns the bytes per second that a rank sends to those of its host, in all hosts at once."""
    local = collective.subgroup(hosts.local_ranks(collective.rank))
    # A fixed size: subgroups make their calls together.
    large = tf.zeros([_LOCAL_BYTES // 4])

    def exchange() -> list[tf.Tensor]:
        return local.all_reduce([large], "link/local")

    _seconds(clock, exchange, 1)
    (seconds,) = agreed(collective, [_seconds(clock, exchange, _REPEATS)])
    most = max(map(len, hosts.ranks))
    return 2 * (most - 1) / most * _LOCAL_BYTES / max(seconds, 1e-9)


def measure_codec(
    collective: Collective, compressor: Compressor, clock: Clock = tf.timestamp
) -> float:
    """Measures encoding and decoding, including error feedback; a collective call.

    Returns:
        Seconds per byte of gradients, the same on all ranks.
    """
    alone = LoopbackCollective(collective.size)
    memory = compressor.memory(collective.size)
    gradient = tf.random.stateless_normal(_SHAPE, [1, collective.rank])
    scales = Scales(tf.constant(1.0), tf.constant(1.0))

    def step() -> None:
        gradients, memories = [gradient], [memory.init(_SHAPE)]
        if isinstance(compressor, ChunkCompressor):
            total = sum_in_two_phases(
                alone, compressor, gradients, memories, [{}], scales, tf.constant(0), "codec"
            )
        else:
            states = [compressor.init("codec", _SHAPE)]
            total = sum_in_rounds(alone, compressor, gradients, memories, states, scales, "codec")
        total[1].numpy()

    _seconds(clock, step, 1)
    return agreed(collective, [_seconds(clock, step, _REPEATS)])[0] / (4 * _SHAPE[0] * _SHAPE[1])


def agreed(collective: Collective, values: Sequence[float]) -> list[float]:
    """Returns the means over all ranks; a collective call."""
    (total,) = collective.all_reduce([tf.constant(values, tf.float64)], f"agreed_{len(values)}")
    return [float(v) / collective.size for v in total.numpy()]


def _seconds(clock: Clock, call: Callable[[], object], repeats: int) -> float:
    """Returns the median duration of `repeats` calls."""
    times = []
    for _ in range(repeats):
        begin = clock()
        call()
        times.append(float(clock() - begin))
    return statistics.median(times)
