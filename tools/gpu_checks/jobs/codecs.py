"""Times each codec for `tools.gpu_checks` on a device, and profiles it there.

    python -m tools.gpu_checks.jobs.codecs --kind cpu

A gradient is encoded and decoded in both phases, without an exchange. The error is the part that
the codec loses: on the device, and for comparison on a CPU.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.harness import report, start
from tools.gpu_checks import trace
from tools.gpu_checks.jobs import placement

# Shapes of the float32 gradient that is timed, and of the one that is compared with a CPU.
SHAPES = {"cpu": (512, 512), "gpu": (4096, 4096)}
COMPARED = (512, 512)
TIMED, PROFILED = 10, 3


def summing(codec, device: str, shape: tuple[int, int]) -> Callable:
    """Returns a callable that sums a gradient on a device and returns the sum and the gradient."""
    import tensorflow as tf

    from tfdml.collectives.loopback import LoopbackCollective
    from tfdml.compression.compressor import ChunkCompressor
    from tfdml.compression.error_feedback import Scales
    from tfdml.compression.exchange.rounds import sum_in_rounds
    from tfdml.compression.exchange.two_phase import sum_in_two_phases

    alone = LoopbackCollective(1)
    with tf.device(device):
        gradient = tf.random.stateless_normal(shape, [1, 2], alg="philox")
        memories = [codec.memory(1).init(shape)]
        scales = Scales(tf.constant(1.0), tf.constant(1.0))
        if isinstance(codec, ChunkCompressor):
            servers = [{} for _ in codec.parts([shape])]
        else:
            states = [codec.init("w", shape)]

    @tf.function
    def run():
        with tf.device(device):
            if isinstance(codec, ChunkCompressor):
                sums, *_ = sum_in_two_phases(
                    alone, codec, [gradient], memories, servers, scales, tf.constant(0), "w"
                )
            else:
                sums, *_ = sum_in_rounds(alone, codec, [gradient], memories, states, scales, "w")
            return sums[0], gradient

    return run


def error(run: Callable) -> float:
    """Returns the norm of the error relative to that of the gradient."""
    import numpy as np

    found, gradient = (t.numpy() for t in run())
    return float(np.linalg.norm(found - gradient) / np.linalg.norm(gradient))


def seconds(run: Callable) -> float:
    """Returns the median seconds of a call, until the device has finished it."""
    import tensorflow as tf

    times = []
    for _ in range(TIMED):
        tf.test.experimental.sync_devices()
        began = time.perf_counter()
        run()
        tf.test.experimental.sync_devices()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def profiled(run: Callable):
    """Returns the profile of a few calls."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        tf.test.experimental.sync_devices()
        tf.profiler.experimental.start(directory)
        for _ in range(PROFILED):
            run()
        tf.test.experimental.sync_devices()
        tf.profiler.experimental.stop()
        return trace.read(Path(directory))


def sizes(space) -> list[int]:
    """Returns the bytes of each copy between a GPU and the host."""
    return [copy.size for copy in trace.host_copies(space)]


def main(kind: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu") -> None:
    """Reports each codec's errors, seconds, and the bytes of its copies to or from the host."""
    placement.prepare(kind)
    # On CPUs one logical device is tested and the other is the reference.
    device = placement.devices(kind, 1 if kind == "gpu" else 2)[-1]
    from tools.bench.codecs import CODECS

    shape = SHAPES[kind]
    found = []
    for codec in CODECS:
        run = summing(codec, device, shape)
        one = {
            "name": repr(codec),
            "error": error(summing(codec, device, COMPARED)),
            "on a processor": error(summing(codec, "CPU:0", COMPARED)),
            "on": run()[0].device,
            "seconds": seconds(run),
        }
        space = profiled(run)
        one["events"] = sum(1 for _ in trace.events(space))
        one["copies"] = sizes(space) if kind == "gpu" else None
        found.append(one)
    # A copy that the parser must find: `Tensor.numpy` reads the sum.
    control = sizes(profiled(lambda: run()[0].numpy())) if kind == "gpu" else None
    report({"codecs": found, "bytes": 4 * shape[0] * shape[1], "control": control})


if __name__ == "__main__":
    start(__doc__, main)
