"""Times the exchange of a network's gradients, its parts, and its two ways."""

import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients, sum_in_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.horovod import HorovodCollective
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.compression import Compressor
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.two_phase import encoder
from tfdml.compression.exchange.way_choice import is_faster_by_hosts
from tools.bench.compression.model import WARM_UP, timed
from tools.bench.compression.networks import NETWORKS

# Exchanges in each way, in turns.
_TURNS = 15


class _Recorded(LoopbackCollective):
    """Collective that records the exchanged tensors."""

    def __init__(self, size: int):
        super().__init__(size)
        self.calls: list[tuple[str, list[tf.Tensor], str]] = []

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Returns what it is given, and notes it."""
        self.calls.append(("all_reduce", list(tensors), name))
        return super().all_reduce(tensors, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Repeats what it is given, and notes it."""
        self.calls.append(("all_gather", [tensor], name))
        return super().all_gather(tensor, name)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns what it is given, and notes it."""
        self.calls.append(("all_to_all", [tensor], name))
        return super().all_to_all(tensor, name)


def exchange(
    network: str, compressor: Compressor | None, steps: int, hosts: Hosts | None = None
) -> dict[str, float]:
    """Times the gradient exchange alone, and separately its parts, which overlap in it.

    The parts are timed only for exchanges at once.

    Args:
        network: Name of the network whose gradients are exchanged.
        compressor: Their compressor; None for no compression.
        steps: Number of timed steps.
        hosts: Hosts and their ranks; None to sum over all ranks at once.

    Returns:
        Median seconds: "together" for all; "encode" for the work before the first exchange, if it
        is one stage; "codec" for all without the exchanges; "wire" for the exchanges without the
        codec.
    """
    collective = HorovodCollective()
    gradients = _gradients(network, collective.rank)

    def median(step: Callable[[], tf.Tensor]) -> float:
        return timed(_compiled(step), steps, WARM_UP)["median"]

    parts = {
        "together": timed(whole_exchange(network, compressor, hosts), steps, WARM_UP)["median"]
    }
    if compressor is not None and (hosts is None or not hosts.have_two_levels):
        recorded = _Recorded(collective.size)
        _summing(recorded, compressor, gradients)()
        parts["codec"] = median(
            _summing(LoopbackCollective(collective.size), compressor, gradients)
        )
        parts["wire"] = median(lambda: _replayed(collective, recorded))
        if isinstance(compressor, ChunkCompressor):
            parts["encode"] = median(_encoding(compressor, collective.size, gradients))
    return parts


def whole_exchange(
    network: str, compressor: Compressor | None, hosts: Hosts | None = None
) -> Callable[[], object]:
    """Returns a call that exchanges the network's gradients once, as a strategy does.

    Args:
        network: Name of the network whose gradients are exchanged.
        compressor: Their compressor; None for no compression.
        hosts: Hosts and their ranks; None to sum over all ranks at once.
    """
    collective = HorovodCollective()
    gradients = _gradients(network, collective.rank)
    return _compiled(_summing(collective, compressor, gradients, hosts))


def both_ways(network: str, compressor: Compressor, hosts: Hosts) -> dict[str, float]:
    """Times the exchange of gradients at once and by hosts, in turns.

    Args:
        network: Name of the network whose gradients are exchanged.
        compressor: Their compressor.
        hosts: Hosts and their ranks.

    Returns:
        Whether the strategy would sum "by_hosts"; the median seconds "at once" and "by hosts"; and
        the median of the "ratio" of the chosen way's seconds to those at once, of each turn.
    """
    collective = HorovodCollective()
    gradients = _gradients(network, collective.rank)
    chosen = is_faster_by_hosts(collective, hosts, compressor, [g.shape for g in gradients])
    seconds: dict[str, list[float]] = {}
    ways = {
        name: _compiled(
            _summing(
                collective,
                compressor,
                gradients,
                hosts,
                lambda *_, by_hosts=name == "by hosts": by_hosts,
                name.replace(" ", "_"),
            )
        )
        for name in ("at once", "by hosts")
    }
    for turn in range(WARM_UP + _TURNS):
        # The one that comes second finds the caches filled: each does in every other turn.
        for name in sorted(ways, reverse=turn % 2 == 1):
            begin = time.perf_counter()
            ways[name]()
            if turn >= WARM_UP:
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
    of_chosen = seconds["by hosts" if chosen else "at once"]
    ratios = [a / b for a, b in zip(of_chosen, seconds["at once"], strict=True)]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {"by_hosts": chosen, **medians, "ratio": statistics.median(ratios)}


def _gradients(network: str, rank: int) -> list[tf.Variable]:
    return [
        tf.Variable(tf.random.stateless_normal(v.shape, [i, rank]))
        for i, v in enumerate(NETWORKS[network][0]().trainable_variables)
    ]


def _compiled(step: Callable[[], tf.Tensor]) -> Callable[[], object]:
    # As in a step of a strategy, which AutoGraph does not convert.
    compiled = tf.function(step, autograph=False)
    return lambda: compiled().numpy()


def _summing(
    collective: Collective,
    compressor: Compressor | None,
    gradients: list[tf.Variable],
    hosts: Hosts | None = None,
    choose_hosts: Callable[..., bool] | None = None,
    label: str = "compressed",
) -> Callable[[], tf.Tensor]:
    names = [str(i) for i in range(len(gradients))]
    aggregator = compressor and CompressedAggregator(
        collective, compressor, hosts=hosts, choose_hosts=choose_hosts
    )

    def step() -> tf.Tensor:
        own = [g.read_value() for g in gradients]
        if aggregator is None:
            sums = sum_in_buckets(collective, own, "plain")
        else:
            sums = aggregator.aggregate(StepGradients(own, names, label))
        return _used(sums)

    return step


def _encoding(
    compressor: ChunkCompressor, size: int, gradients: list[tf.Variable]
) -> Callable[[], tf.Tensor]:
    memory = compressor.memory(size)
    taken = [g for g in gradients if compressor.takes(g.shape, g.dtype)]
    memories = [{k: tf.Variable(v) for k, v in memory.init(g.shape).items()} for g in taken]

    def step() -> tf.Tensor:
        payloads = []
        for gradient, state in zip(taken, memories, strict=True):
            ((codec, _),) = compressor.parts([gradient.shape])
            encode = encoder(codec, size)
            values = {key: variable.read_value() for key, variable in state.items()}
            one = tf.constant(1.0)
            payload, (after,) = encode(
                [gradient.read_value()], [values], one, one, tf.constant([0, 1])
            )
            for key, variable in state.items():
                variable.assign(after[key])
            payloads.append(payload)
        return _used(payloads)

    return step


def _replayed(collective: Collective, recorded: _Recorded) -> tf.Tensor:
    results = []
    for kind, tensors, name in recorded.calls:
        own = [tf.identity(t) for t in tensors]
        if kind == "all_reduce":
            results += collective.all_reduce(own, f"wire/{name}")
        else:
            results.append(getattr(collective, kind)(own[0], f"wire/{name}"))
    return _used(results)


def _used(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Uses all tensors so that none is pruned; summing all values would cost a pass over them."""
    return tf.add_n([tf.cast(tf.reshape(t, [-1])[0], tf.float32) for t in tensors])
