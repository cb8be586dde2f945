"""Program of a rank of `tfdml bench`: measures, and prints the table on rank 0."""

import argparse
from collections.abc import Sequence

import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfdml
from tfdml import compression
from tfdml.collectives.collective import Collective
from tfdml.collectives.hosts import Hosts
from tfdml.compression.auto.cost_model import Link, exchange_seconds, traffic, wire_seconds
from tfdml.compression.auto.measure import measure_codec, measure_link
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.exchange.by_hosts import can_sum_by_hosts
from tfdml.compression.exchange.way_choice import is_faster_by_hosts

# 25 million weights, as in ResNet-50, but in large layers.
_SHAPES = [(2048, 2048)] * 6
_CANDIDATES = (
    compression.Float16(),
    compression.BFloat16(),
    compression.QSGD(8),
    compression.QSGD(4),
    compression.QSGD(2),
    compression.NaturalCompression(),
    compression.TernGrad(),
    compression.OneBit(),
    compression.TopK(0.01),
    compression.RandomK(0.1),
    compression.PowerSGD(4),
)


def model_shapes(path: str) -> list[tuple[int, ...]]:
    """Returns the shapes of a saved model's trainable weights, in order."""
    import keras

    model = keras.models.load_model(path, compile=False)
    return [tuple(w.shape) for w in model.trainable_weights]


def table(
    link: Link,
    hosts: Hosts,
    shapes: Sequence[Sequence[int]],
    codecs: Sequence[tuple[compression.Compressor | None, float, bool]],
) -> Table:
    """Returns the predicted time of a step's gradient exchange with each compressor.

    Args:
        link: Measured latency and bandwidth.
        hosts: Hosts and their ranks.
        shapes: Shapes of the gradients.
        codecs: Compressors (None for no compression), their seconds per byte, and whether
            gradients are summed by hosts; the uncompressed exchange first.
    """
    dtypes = [tf.float32] * len(shapes)
    size = sum(map(len, hosts.ranks))
    rows = []
    for compressor, seconds, by_hosts in codecs:
        sent = traffic(compressor, shapes, dtypes, size, hosts=hosts, by_hosts=by_hosts)
        whole = exchange_seconds(sent, link, seconds)
        name = "none" if compressor is None else repr(compressor)
        name += ", by hosts" if by_hosts else ""
        rows.append((name, sent, sent.encoded * seconds, whole))
    plain = rows[0][3]
    sender = "MB per host" if hosts.have_two_levels else "MB sent"
    made = Table(
        "compression", sender, "wire, ms", "codec, ms", "exchange, ms", "times as fast",
        title=f"A step's exchange on {_in_words(hosts)}: {link.latency * 1e3:.2f} ms latency, "
        f"{link.bandwidth * 8e-6:.0f} Mbit/s",
    )  # fmt: skip
    for name, sent, codec, whole in sorted(rows, key=lambda row: row[3]):
        made.add_row(
            name,
            f"{sent.sent / 1e6:.2f}",
            f"{1e3 * wire_seconds(sent, link):.1f}",
            f"{1e3 * codec:.1f}",
            f"{1e3 * whole:.1f}",
            f"{plain / whole:.2f}",
        )
    return made


def _in_words(hosts: Hosts) -> str:
    """Returns the number of ranks and, if hosts have several, of hosts."""
    numbers = "+".join(str(len(own)) for own in hosts.ranks)
    of_hosts = f" of {hosts.count} hosts ({numbers})" if hosts.have_two_levels else ""
    return f"{sum(map(len, hosts.ranks))} ranks{of_hosts}"


def _measured(
    collective: Collective, hosts: Hosts, compressor: compression.Compressor, shapes: Sequence
) -> tuple[compression.Compressor, float, bool]:
    """Returns a compressor, its seconds per byte, and whether gradients are summed by hosts."""
    can = isinstance(compressor, ChunkCompressor) and can_sum_by_hosts(compressor, hosts)
    by_hosts = can and is_faster_by_hosts(collective, hosts, compressor, shapes)
    return compressor, measure_codec(collective, compressor), by_hosts


def main() -> None:
    """Measures link and codecs on this rank; the chief prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--horovod", action="store_true")
    parser.add_argument("--model")
    given = parser.parse_args()
    strategy = tfdml.HorovodStrategy() if given.horovod else tfdml.MultiWorkerMirroredStrategy()
    shapes = model_shapes(given.model) if given.model else _SHAPES
    collective = strategy.extended.collective
    hosts = strategy.extended.aggregator_choice.hosts
    link = measure_link(collective, hosts=hosts)
    codecs = [(None, 0.0, False)]
    codecs += [_measured(collective, hosts, c, shapes) for c in _CANDIDATES]
    if strategy.is_chief:
        Console(width=100).print(table(link, hosts, shapes, codecs))


if __name__ == "__main__":
    main()
