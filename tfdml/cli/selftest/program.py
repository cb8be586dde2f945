"""Program of each rank of `tfdml test`: trains a small model and prints the results.

    tfdml launch --workers 2 -- -m tfdml.cli.selftest.program multi_worker_mirrored

Data, model and initial weights are the same in every run, so losses and weights must be too.
"""

import argparse
import base64
import contextlib
import hashlib
import math
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.cli.selftest.events import Event

# The last batch has 64 rows, and three ranks cannot share one evenly.
ROWS, BATCH, EPOCHS = 1984, 128, 4
CLASSES = 10


class EpochTimes(keras.callbacks.Callback):
    """Callback that records the seconds of each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Records the start of the epoch."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Records the duration of the epoch."""
        self.seconds.append(time.perf_counter() - self._began)


def images() -> tuple[np.ndarray, np.ndarray]:
    """Returns images, `[ROWS, 28, 28, 1]`, and labels: one pattern per class, plus noise."""
    numbers = np.random.default_rng(0)
    patterns = numbers.normal(size=(CLASSES, 28, 28, 1))
    labels = numbers.integers(CLASSES, size=ROWS)
    noise = 2.0 * numbers.normal(size=(ROWS, 28, 28, 1))
    return (patterns[labels] + noise).astype("float32"), labels.astype("int64")


def compiled_model() -> keras.Model:
    """Returns a small convolutional model, compiled, with 106,000 weights."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(32, 3, padding="same", activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )
    # Not Adam: it turns the rounding error of a gradient near 0 into a whole step.
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def train(run: str, strategy: tf.distribute.Strategy | None) -> Event:
    """Trains the model.

    Args:
        run: Name of the run.
        strategy: Strategy to train under; None for plain Keras.

    Returns:
        Event with this rank's results.
    """
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = compiled_model()
    times = EpochTimes()
    # Global batches. Asynchronous training needs to know how many steps an epoch has.
    rows = tf.data.Dataset.from_tensor_slices(images()).batch(BATCH).repeat()
    history = model.fit(
        rows,
        epochs=EPOCHS,
        steps_per_epoch=math.ceil(ROWS / BATCH),
        shuffle=False,
        callbacks=[times],
        verbose=0,
    )
    copies = _copies(model)
    rank = getattr(strategy, "rank", 0)
    return Event(
        run,
        rank,
        losses=[float(loss) for loss in history.history["loss"]],
        # The first epoch traces and compiles.
        samples_per_second=ROWS * (EPOCHS - 1) / sum(times.seconds[1:]),
        digests=[hashlib.sha256(copy).hexdigest() for copy in copies],
        weights=base64.b64encode(copies[0]).decode() if rank == 0 else "",
    )


def _copies(model: keras.Model) -> list[bytes]:
    """Returns all weights as bytes, once for each replica of this process."""
    values = [getattr(weight.value, "values", (weight.value,)) for weight in model.weights]
    if len({len(of_replicas) for of_replicas in values}) > 1:
        raise RuntimeError("Every weight must have a copy on each replica.")
    return [
        b"".join(value.numpy().astype("<f4").tobytes() for value in replica)
        for replica in zip(*values, strict=True)
    ]


def _share_this_machine(ranks: int, devices: int) -> list[str]:
    """Gives this process its share of the cores and GPUs, before TensorFlow takes all of them.

    Args:
        ranks: Number of processes that train on this machine.
        devices: Number of CPU devices to create for `MirroredStrategy` without GPUs.

    Returns:
        Devices of this process for `MirroredStrategy`; [] if several processes share the machine.
    """
    tf.config.threading.set_intra_op_parallelism_threads(max(1, (os.cpu_count() or 1) // ranks))
    gpus = tf.config.list_physical_devices("GPU")
    if ranks > 1:
        # `HorovodStrategy` selects its rank's GPU itself, if it sees all of them.
        if len(gpus) < ranks:
            tf.config.set_visible_devices([], "GPU")
        return []
    if gpus:
        return [f"GPU:{number}" for number in range(len(gpus))]
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(cpu, parts)
    return [f"CPU:{number}" for number in range(devices)]


def main() -> None:
    """Trains under the strategy named on the command line, and prints the events."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("--ranks-here", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()
    # Full float32 everywhere: the 10-bit mantissa of TensorFloat-32 would exceed the tolerance.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    devices = _share_this_machine(given.ranks_here, given.devices)
    for run, strategy in _strategies(given.strategy, devices):
        Event(run).send()
        train(run, strategy()).send()


def _strategies(name: str, devices: list[str]) -> list[tuple]:
    """Returns the names of a job's runs, each with a function that creates its strategy."""
    jobs = {
        "one_process": [("one_process", lambda: None)],
        "mirrored": [("mirrored", lambda: tfdml.MirroredStrategy(devices))],
        "multi_worker_mirrored": [
            ("multi_worker_mirrored", tfdml.MultiWorkerMirroredStrategy),
            ("compressed", lambda: tfdml.MultiWorkerMirroredStrategy(compression="qsgd")),
        ],
        "horovod": [("horovod", tfdml.HorovodStrategy)],
        "parameter_server": [
            ("parameter_server", lambda: tfdml.ParameterServerStrategy(synchronous=True)),
            ("asynchronous", tfdml.ParameterServerStrategy),
        ],
    }
    return jobs[name]


if __name__ == "__main__":
    main()
