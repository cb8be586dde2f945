"""Program of a rank of `tfdml bench`: measures, and prints the table on rank 0."""

import argparse
from collections.abc import Sequence

import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfdml
from tfdml import compression
from tfdml.compression.auto.cost_model import Link, exchange_seconds, traffic
from tfdml.compression.auto.measure import measure_codec, measure_link

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
    size: int,
    shapes: Sequence[Sequence[int]],
    codecs: Sequence[tuple[compression.Compressor | None, float]],
) -> Table:
    """Returns the predicted time of a step's gradient exchange with each compressor.

    Args:
        link: Measured latency and bandwidth.
        size: Number of ranks.
        shapes: Shapes of the gradients.
        codecs: Compressors (None for no compression) and their seconds per byte, the uncompressed
            exchange first.
    """
    dtypes = [tf.float32] * len(shapes)
    rows = []
    for compressor, seconds in codecs:
        sent = traffic(compressor, shapes, dtypes, size)
        whole = exchange_seconds(sent, link, seconds)
        rows.append((compressor, sent, sent.encoded * seconds, whole))
    plain = rows[0][3]
    made = Table(
        "compression", "MB sent", "wire, ms", "codec, ms", "exchange, ms", "times as fast",
        title=f"A step's exchange on {size} ranks: {link.latency * 1e3:.2f} ms latency, "
        f"{link.bandwidth * 8e-6:.0f} Mbit/s",
    )  # fmt: skip
    for compressor, sent, codec, whole in sorted(rows, key=lambda row: row[3]):
        wire = sent.sent / link.bandwidth + sent.exchanges * link.latency
        made.add_row(
            "none" if compressor is None else repr(compressor),
            f"{sent.sent / 1e6:.2f}",
            f"{1e3 * wire:.1f}",
            f"{1e3 * codec:.1f}",
            f"{1e3 * whole:.1f}",
            f"{plain / whole:.2f}",
        )
    return made


def main() -> None:
    """Measures link and codecs on this rank; the chief prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--horovod", action="store_true")
    parser.add_argument("--model")
    given = parser.parse_args()
    strategy = tfdml.HorovodStrategy() if given.horovod else tfdml.MultiWorkerMirroredStrategy()
    shapes = model_shapes(given.model) if given.model else _SHAPES
    collective = strategy.extended.collective
    link = measure_link(collective)
    codecs = [(None, 0.0), *((c, measure_codec(collective, c)) for c in _CANDIDATES)]
    if strategy.is_chief:
        Console(width=100).print(table(link, strategy.size, shapes, codecs))


if __name__ == "__main__":
    main()
