"""Program run by `tfdml launch`: trains and serves its numbers until a file exists."""

import sys
from pathlib import Path

import keras

import tfdml
from tests.callbacks.performance_cases import BATCH, linear, problem


class Stop(keras.callbacks.Callback):
    """Callback that ends training after an epoch in which a file has come into being."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.path.exists()


def main(port: int, stop: Path) -> None:
    """Trains until `stop` exists."""
    strategy = tfdml.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = linear()
    x, y = problem(50)
    callbacks = [tfdml.callbacks.PrometheusExporter(port), Stop(stop)]
    model.fit(x, y, batch_size=BATCH, epochs=100_000, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
