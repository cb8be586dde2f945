"""What the chief runs while processes of its cluster are killed."""

import time
from pathlib import Path

import keras

from tests.strategies.parameter_server_cases import CountedMean, classifier, dataset
from tfdml.strategies import ParameterServerStrategy

BATCH = 8


class Marks(keras.callbacks.Callback):
    """Writes a file when training comes to a step, and notes when steps ended.

    Args:
        directory: Where.
        steps: Which steps.
    """

    def __init__(self, directory: str, steps: tuple[int, ...] = (20,)):
        super().__init__()
        self._directory = Path(directory)
        self._steps = steps
        self.times: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.monotonic())
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


def fit_beside_a_slow_worker(directory: str) -> dict:
    """`fit` while a worker stands still for a while."""
    strategy = ParameterServerStrategy()
    model = _model(strategy)
    marks = Marks(directory)
    steps = 600
    pace = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: time.sleep(0.01))
    model.fit(dataset(), epochs=1, steps_per_epoch=steps, verbose=0, callbacks=[marks, pace])
    # The last steps wait for all.
    pauses = [b - a for a, b in zip(marks.times[20:-10], marks.times[21:-9], strict=True)]
    return {
        "steps": steps,
        "iterations": int(model.optimizer.iterations.numpy()),
        "longest_pause": max(pauses),
    }
