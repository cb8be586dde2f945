"""Measures how long a pipeline's stages are idle, with stages that take a fixed time.

    python -m tools.bench.pipeline.timed_stages

A pass of a stage sleeps, so that stages do not compete for the cores: what is left is what the
schedule, TensorFlow and the update take.
"""

import statistics
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.pipeline.schedule import max_in_flight
from tools.bench.harness import start

# Seconds of a pass of a stage on a microbatch.
SECONDS = 0.05
CASES = ((2, 4, "1f1b"), (2, 16, "1f1b"), (4, 4, "1f1b"), (4, 16, "1f1b"), (4, 16, "gpipe"))


class Sleeping(keras.layers.Layer):
    """Layer whose passes take a fixed time, and note when they run.

    Attributes:
        passes: Number of the stage, change of the microbatches in flight, begin and end of each.
    """

    passes: list[tuple[int, int, float, float]] = []
    lock = threading.Lock()

    def __init__(self, stage: int):
        super().__init__()
        self.stage = stage

    def build(self, shape: tuple) -> None:
        """Makes a weight: without one, there would be no gradient."""
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns a product of `inputs`."""

        @tf.custom_gradient
        def sleeping(x):
            return self._sleep(x, 1), lambda upstream: self._sleep(upstream, -1)

        return sleeping(tf.matmul(inputs, self.kernel))

    def _sleep(self, tensor: tf.Tensor, change: int) -> tf.Tensor:
        def sleep(values: np.ndarray) -> np.ndarray:
            begin = time.monotonic()
            time.sleep(SECONDS)
            with self.lock:
                self.passes.append((self.stage, change, begin, time.monotonic()))
            return values

        same = tf.numpy_function(sleep, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(same, tensor.shape)


def measure(stages: int, microbatches: int, schedule: str, steps: int = 4) -> tuple[float, list]:
    """Trains; returns the idle part of a step, and the most microbatches in flight by stage."""
    pipeline = tfdml.PipelineParallel(microbatches, schedule)
    group = [f"CPU:{number}" for number in range(stages)]
    with tfdml.MirroredStrategy([group], pipeline=pipeline).scope():
        model = keras.Sequential([keras.Input((4,)), *map(Sleeping, range(stages))])
        model.compile("sgd", "mse")
    x = np.ones((2 * microbatches, 4), "float32")
    idle = []
    for _ in range(steps):
        Sleeping.passes.clear()
        model.train_on_batch(x, x)
        begins, ends = [p[2] for p in Sleeping.passes], [p[3] for p in Sleeping.passes]
        idle.append(1 - 2 * microbatches * SECONDS / (max(ends) - min(begins)))
    in_flight = []
    for stage in range(stages):
        own = sorted((begin, change) for s, change, begin, _ in Sleeping.passes if s == stage)
        in_flight.append(int(np.cumsum([change for _, change in own]).max()))
    return statistics.median(idle), in_flight


def main() -> None:
    """Prints a row for each pipeline."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    tf.config.threading.set_inter_op_parallelism_threads(8)
    print(
        "| stages, microbatches | schedule | idle | (p - 1) / (m + p - 1) | in flight, by stage |"
    )
    print("|---|---|---:|---:|---|")
    for p, m, schedule in CASES:
        idle, in_flight = measure(p, m, schedule)
        expected = [max_in_flight(stage, p, m, schedule) for stage in range(p)]
        flight = ", ".join(map(str, in_flight)) + (" (wrong)" if in_flight != expected else "")
        print(f"| {p}, {m} | {schedule} | {idle:.3f} | {(p - 1) / (m + p - 1):.3f} | {flight} |")


if __name__ == "__main__":
    start(__doc__, main)
