"""What the chief runs while processes of its cluster are killed."""

import time
from collections.abc import Sequence
from pathlib import Path

import keras

from tests.strategies.parameter_server.cases import CountedMean, classifier, dataset
from tfdml.strategies import ParameterServerStrategy

BATCH = 8


class Marks(keras.callbacks.Callback):
    """Writes a file when training comes to a step.

    Args:
        directory: Where.
        steps: Which steps.
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
    """Stops training some steps after a worker has come back."""

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
    """`fit` while a worker is killed and started again."""
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
    # TensorFlow connects to a worker that is back at its own pace.
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
    """`fit` until something ends it; returns what was raised."""
    strategy = ParameterServerStrategy()
    model = _model(strategy)
    try:
        model.fit(
            dataset(), epochs=1, steps_per_epoch=10**6, verbose=0, callbacks=[Marks(directory)]
        )
    except Exception as error:  # noqa: BLE001 (what it is, is what the test asks)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def start_without_all() -> str:
    """Returns what a strategy says that not all workers come for."""
    try:
        ParameterServerStrategy(start_limit=2.0)
    except TimeoutError as error:
        return str(error)
    return "nothing was raised"


class UntilEnough(keras.callbacks.Callback):
    """Trains until it is told that it is enough.

    Args:
        directory: Where a file of that name says so.
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
    """`fit` that says every ten steps how far it is."""
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
