"""Cases run by a chief while processes of its cluster are killed."""

import time
from collections.abc import Sequence
from pathlib import Path

import keras

from tests.strategies.parameter_server.cases import CountedMean, classifier, dataset
from tfdml.strategies import ParameterServerStrategy

BATCH = 8


class Marks(keras.callbacks.Callback):
    """Writes a file when training reaches a step.

    Args:
        directory: Directory of the files.
        steps: Steps at which a file is written.
    """

    def __init__(self, directory: str, steps: Sequence[int] = (20,)):
        super().__init__()
        self._directory = Path(directory)
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if batch in self._steps:
            (self._directory / f"step{batch}").touch()


def _model(strategy) -> keras.Model:
    with strategy.scope():
        counted = CountedMean(name="samples")
    return classifier(strategy, metrics=[counted])


class UntilBack(keras.callbacks.Callback):
    """Stops training some steps after a worker has rejoined."""

    def __init__(self, link):
        super().__init__()
        self._link = link
        self.steps = 0
        self._more = 60

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        time.sleep(0.005)
        self._more -= self._link.returned
        if self._more <= 0:
            self.model.stop_training = True


def fit_until_worker_is_back(directory: str) -> dict:
    """Runs `fit` while a worker is killed and restarted."""
    strategy = ParameterServerStrategy()
    model = _model(strategy)
    until = UntilBack(strategy.connection.link)
    history = model.fit(
        dataset(),
        epochs=1,
        steps_per_epoch=20000,
        verbose=0,
        callbacks=[Marks(directory), until],
    )
    iterations = int(model.optimizer.iterations.numpy())
    workers: set[int] = set()
    deadline = time.monotonic() + 60
    # TensorFlow reconnects to a restarted worker after some time.
    while workers != {0, 1} and time.monotonic() < deadline:
        model.fit(dataset(), epochs=1, steps_per_epoch=30, verbose=0)
        workers |= model.train_function.workers_seen
    return {
        "steps": until.steps,
        "iterations": iterations,
        "samples": history.history["samples"][0],
        "returned": strategy.connection.link.returned,
        "workers_after": sorted(workers),
    }


def fit_for_ever(directory: str) -> str:
    """Runs `fit` until an error ends it; returns the error."""
    strategy = ParameterServerStrategy()
    model = _model(strategy)
    try:
        model.fit(
            dataset(), epochs=1, steps_per_epoch=10**6, verbose=0, callbacks=[Marks(directory)]
        )
    except Exception as error:  # noqa: BLE001 (the test checks the error)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def start_without_all() -> str:
    """Returns the error of a strategy if a worker is missing."""
    try:
        ParameterServerStrategy(start_limit=2.0)
    except TimeoutError as error:
        return str(error)
    return "nothing was raised"


class UntilEnough(keras.callbacks.Callback):
    """Trains until a file tells it to stop.

    Args:
        directory: Directory in which the file appears.
    """

    def __init__(self, directory: str):
        super().__init__()
        self._enough = Path(directory) / "enough"
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        time.sleep(0.01)
        if self._enough.exists():
            self.model.stop_training = True


def fit_until_enough(directory: str) -> dict:
    """Runs `fit` and records its progress every ten steps."""
    strategy = ParameterServerStrategy()
    model = _model(strategy)
    until = UntilEnough(directory)
    model.fit(
        dataset(),
        epochs=1,
        steps_per_epoch=20000,
        verbose=0,
        callbacks=[Marks(directory, range(0, 20000, 10)), until],
    )
    return {"steps": until.steps, "iterations": int(model.optimizer.iterations.numpy())}
