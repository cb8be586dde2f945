"""The workloads of the trial: those that show what codecs cost, in one process."""

import dataclasses
import math
from collections.abc import Callable

import keras
import numpy as np

from tools.bench.compression.trainings import MOMENTUM, Images, Text
from tools.bench.local_updates.simulation import Method, Simulation, exchanges, shuffled


@dataclasses.dataclass(frozen=True)
class Workload:
    """Data, model and optimizer of a training.

    Attributes:
        x, y: Training data and labels.
        x_val, y_val: The same for validation.
        model: Makes the model.
        optimizer: Makes the inner optimizer, with its schedule.
        metric: Makes the metric of the result.
        batch: Rows of a global batch.
        epochs: Number of epochs.
    """

    x: np.ndarray
    y: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray
    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.Optimizer]
    metric: Callable[[], keras.Metric]
    batch: int
    epochs: int

    def result(self, method: Method, workers: int, seed: int) -> float:
        """Trains once; returns the metric of the validation data.

        Args:
            method: The method of training.
            workers: Number of workers.
            seed: Seed of the initial weights and of the order of the data.
        """
        keras.utils.set_random_seed(seed)
        model, loss = self.model(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        batches = shuffled(len(self.x), self.batch, self.epochs, seed)
        simulation = Simulation(model, self.optimizer(), loss, workers)
        simulation.train(self.x, self.y, batches, self.epochs, method)
        model.compile(loss=loss, metrics=[self.metric()])
        return model.evaluate(self.x_val, self.y_val, batch_size=256, verbose=0)[1]

    def exchanges(self, method: Method) -> int:
        """Returns how often workers exchange gradients or weights in a training."""
        return exchanges(method, self.epochs, math.ceil(len(self.x) / self.batch))


def on_images() -> Workload:
    """Returns the small network on Fashion-MNIST: SGD with momentum."""
    import images
    import large_batch

    training = Images()
    data = images.load().limited(training.rows)
    return Workload(
        x=data.x,
        y=data.y,
        x_val=data.x_val,
        y_val=data.y_val,
        model=lambda: large_batch.build_model(data.x.shape[1:], classes=10),
        optimizer=lambda: training.optimizers[MOMENTUM](training.schedule),
        metric=keras.metrics.SparseCategoricalAccuracy,
        batch=training.batch,
        epochs=training.epochs,
    )


def on_text() -> Workload:
    """Returns the small transformer on Python's standard library: Adam."""
    import transformer

    training = Text()
    (x, y, classes), held_out, _ = training.samples()
    return Workload(
        x=x[held_out:],
        y=y[held_out:],
        x_val=x[:held_out],
        y_val=y[:held_out],
        model=lambda: transformer.build_model(classes, training.width),
        optimizer=lambda: training.optimizers["Adam"](training.schedule),
        metric=transformer.BitsPerCharacter,
        batch=training.batch,
        epochs=training.epochs,
    )


WORKLOADS = {"images": on_images, "text": on_text}
