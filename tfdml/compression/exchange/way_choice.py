"""Choice between sums over all processes at once and sums by hosts, from measured times."""

import functools
import math
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.by_hosts import HostGroups, sum_by_hosts
from tfdml.compression.exchange.two_phase import sum_in_two_phases

# Buckets that are exchanged together, as in a step; the most values of each, because large messages
# weigh bandwidth against latency as a step does; and the timed exchanges.
_BUCKETS, _VALUES, _REPEATS = 2, 1 << 22, 2
# Sums by hosts must take at most this part of the other way's time: timings of a few exchanges
# differ by as much, and a wrong "by hosts" costs more than a small gain that is missed.
_WORTH_IT = 0.9


def is_faster_by_hosts(
    collective: Collective,
    hosts: Hosts,
    compressor: ChunkCompressor,
    shapes: Sequence[Sequence[int]],
) -> bool:
    """Returns whether sums by hosts are clearly faster, from timings of both ways.

    All processes call this and get the same answer.

    Args:
        collective: Collective between all processes.
        hosts: Hosts and their ranks.
        compressor: The encoding.
        shapes: Shapes of the gradients that will be summed. Buckets of the largest one are timed,
            or of a part of it.
    """
    largest = max(shapes, key=math.prod)
    shape = [max(1, min(math.prod(largest), _VALUES) // largest[-1]), largest[-1]]
    groups = HostGroups(collective, hosts)
    (codec, _), *_ = compressor.parts([shape])
    length = groups.part(codec, [""], [shape]).slice_length
    ways = [
        _step(
            functools.partial(sum_in_two_phases, collective, compressor), compressor, shape, shape
        ),
        _step(functools.partial(sum_by_hosts, groups, compressor), compressor, shape, [length]),
    ]
    seconds: list[list[float]] = [[], []]
    for number in range(1 + _REPEATS):
        for way, found in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way(tf.constant(number)).numpy()
            if number:  # The first call includes compilation.
                found.append(time.perf_counter() - begin)
    # Other programs only ever make an exchange longer.
    shortest = tf.constant([min(found) for found in seconds], tf.float64)
    (total,) = collective.all_reduce([shortest], "timed/seconds")
    seconds_at_once, seconds_by_hosts = total.numpy().tolist()
    return seconds_by_hosts < _WORTH_IT * seconds_at_once


def _step(
    way: Callable, compressor: ChunkCompressor, shape: Sequence[int], state_shape: Sequence[int]
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function of a step's number that sums some buckets.

    Args:
        way: Function that sums a bucket.
        compressor: The encoding.
        shape: Shape of each bucket's gradient.
        state_shape: Shape of what a rank keeps of it.
    """
    scales = Scales(tf.constant(1.0), tf.constant(1.0))

    @tf.function(autograph=False)
    def exchange(step: tf.Tensor) -> tf.Tensor:
        finite = []
        for number in range(_BUCKETS):
            gradient = tf.random.stateless_normal(shape, [number, step])
            state = compressor.memory(1).init(state_shape)
            name = f"timed/{way.func.__name__}_{number}"
            finite.append(way([gradient], [state], [{}], scales, step, name)[1])
        return tf.reduce_all(tf.stack(finite))

    # TensorFlow warns of functions that are made again and again, which these are on purpose.
    return exchange.get_concrete_function(tf.TensorSpec([], tf.int32))
