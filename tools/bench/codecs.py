"""Times the codecs alone, on all cores: Gbit/s of float32 gradients.

    python -m tools.bench.codecs

"encode" is the work before the exchange: adding the residual, encoding, and storing the new
residual; "by XLA" is the same without `tfdml build-codecs`. "exchange" is all the work around it,
including the owner's decoding, adding and encoding, and the last decoding. Sizes are those of one
of 2 ranks, in buckets of 4 million values. "choice" finds the largest values and their indices.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tensorflow as tf
import typer

from tfdml import compression
from tfdml.collectives.loopback import LoopbackCollective
from tfdml.compression.codecs.selection import encoded_largest
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import Scales
from tfdml.compression.exchange.rounds import sum_in_rounds
from tfdml.compression.exchange.two_phase import compiled_stages, encoder, sum_in_two_phases
from tools.bench.harness import conditions, start

SIZE, SHAPE = 2, (2048, 2048)
CODECS = (
    compression.Float16(),
    compression.BFloat16(),
    compression.QSGD(8),
    compression.QSGD(8, stochastic=True),
    compression.QSGD(4),
    compression.QSGD(2),
    compression.NaturalCompression(),
    compression.TernGrad(),
    compression.OneBit(),
    compression.TopK(0.01),
    compression.DeepGradientCompression(0.001),
    compression.RandomK(0.01),
    compression.PowerSGD(4),
)
# Targets in Gbit/s.
BARS = {
    "QSGD(bits=8, bucket_size=512, norm='max', stochastic=False)": 60,
    "QSGD(bits=8, bucket_size=512, norm='max', stochastic=True)": 40,
    "QSGD(bits=4, bucket_size=512, norm='max', stochastic=False)": 50,
    "OneBit()": 50,
}
CHOICE, CHOICE_BAR = 0.01, 40


def seconds(call: Callable[[], object], least: float = 1.0) -> float:
    """Returns the median time of a call, over as many calls as fit in `least` seconds."""
    call(), call()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < least:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(codec: compression.Compressor) -> tuple[float | None, float | None, float]:
    """Returns the seconds of encoding, of encoding by XLA, and of the exchange.

    The first is None for a codec that works in rounds, the second also for one that is not native.
    """
    alone = LoopbackCollective(SIZE)
    gradient = tf.random.stateless_normal(SHAPE, [1, 2])
    memory = codec.memory(SIZE)
    memories = [memory.init(SHAPE)]
    scales, step = Scales(tf.constant(1.0), tf.constant(1.0)), tf.constant(0)
    if not isinstance(codec, ChunkCompressor):
        states = [codec.init("w", SHAPE)]

        @tf.function
        def rounds():
            return sum_in_rounds(alone, codec, [gradient], memories, states, scales, "w")

        return None, None, seconds(lambda: rounds()[1].numpy())

    def encode(stage):
        run = tf.function(lambda: stage([gradient], memories, *scales, tf.constant([0, 1])))
        return seconds(lambda: run()[0].numpy())

    @tf.function
    def exchange():
        return sum_in_two_phases(alone, codec, [gradient], memories, [{}], scales, step, "w")

    ((part, _),) = codec.parts([SHAPE])
    by_xla = encode(compiled_stages(part, SIZE)[0]) if part.native else None
    return encode(encoder(part, SIZE)), by_xla, seconds(lambda: exchange()[1].numpy())


def choice() -> float:
    """Returns the seconds of selecting the largest values of a row."""
    row = tf.random.stateless_normal([1, SHAPE[0] * SHAPE[1]], [1, 2])
    count = int(CHOICE * row.shape[1])
    run = tf.function(lambda: encoded_largest(row, count, count))
    return seconds(lambda: run().numpy())


def verdict(speed: float, bar: float) -> str:
    """Returns a target, and whether it is met, as text."""
    return f"{bar}: {'met' if speed >= bar else '**missed**'}"


def main(
    write: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
) -> None:
    """Prints the table."""
    gigabits = 32e-9 * SHAPE[0] * SHAPE[1]
    lines = ["| | encode | bar | by XLA | exchange |", "|---|---:|---:|---:|---:|"]

    def add(name: str, *cells: str) -> None:
        lines.append(f"| {' | '.join([name, *cells])} |")
        print(lines[-1], file=sys.stderr, flush=True)

    for codec in CODECS:
        speeds = [gigabits / t if t else None for t in measure(codec)]
        bar = BARS.get(repr(codec))
        encode, by_xla, exchange = (f"{speed:.1f}" if speed else "" for speed in speeds)
        add(f"`{codec!r}`", encode, verdict(speeds[0], bar) if bar else "", by_xla, exchange)
    speed = gigabits / choice()
    add(f"choice of the largest {CHOICE:.0%}", f"{speed:.1f}", verdict(speed, CHOICE_BAR), "", "")
    text = f"Gbit/s of float32. Measured with {conditions()}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    if write is not None:
        command = "    python -m tools.bench.codecs"
        write.write_text(f"# How fast the codecs are\n\n{command}\n\n{text}")


if __name__ == "__main__":
    start(__doc__, main)
