"""Cases run by ranks: trainings that serve their numbers, and what a client reads from them."""

import contextlib
import io
import urllib.error
import urllib.request
from typing import Any

import keras

import tfdml
from tests.callbacks.performance_cases import BATCH, linear, problem
from tests.harness import rank_job
from tfdml.callbacks import PerformanceMetrics, PrometheusExporter

Numbers = dict[tuple[str, tuple], float]


def read(port: int) -> Numbers:
    """Returns the numbers served on a port, by name and labels, as Prometheus's client reads."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scrape(keras.callbacks.Callback):
    """Callback that reads the numbers after some step of the second epoch."""

    def __init__(self, port: int):
        super().__init__()
        self.port = port
        self.numbers: Numbers = {}
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 1:
            self.numbers = read(self.port)


def scraped(port: int) -> dict[str, Any]:
    """Returns what this rank serves in its second epoch of 4 steps, and prints.

    Args:
        port: Port of the first rank.
    """
    strategy = rank_job.strategy()
    with strategy.scope():
        model = linear()
    x, y = problem(4)
    scrape = Scrape(port + strategy.rank)
    callbacks = [scrape, PrometheusExporter(port), PerformanceMetrics(window=1)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = model.fit(
            x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks
        ).history["loss"]
    try:
        after = str(read(scrape.port))
    except urllib.error.URLError as error:
        after = "refused" if isinstance(error.reason, ConnectionRefusedError) else str(error)
    return {
        "numbers": scrape.numbers,
        "printed": printed.getvalue(),
        "loss": losses[0],
        "after": after,
    }


def scraped_chief(port: int, synchronous: bool) -> Numbers:
    """Returns what the chief of parameter servers serves.

    Args:
        port: The port.
        synchronous: Argument of the strategy.
    """
    strategy = tfdml.ParameterServerStrategy(synchronous=synchronous)
    with strategy.scope():
        model = linear()
    x, y = problem(6)
    numbers: Numbers = {}

    def end(epoch, logs):
        numbers.update(read(port))

    callbacks = [PrometheusExporter(port), keras.callbacks.LambdaCallback(on_epoch_end=end)]
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    return numbers


def after_an_error(port: int) -> Numbers:
    """Returns what is served by a training after one that has failed, as in a notebook."""
    model = linear()
    x, y = problem(2)

    def fail(epoch, logs):
        raise RuntimeError("a mistake")

    try:
        callbacks = [
            PrometheusExporter(port),
            keras.callbacks.LambdaCallback(on_epoch_end=fail),
        ]
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    except RuntimeError:
        numbers: Numbers = {}

        def end(epoch, logs):
            numbers.update(read(port))

        callbacks = [PrometheusExporter(port), keras.callbacks.LambdaCallback(on_epoch_end=end)]
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    return numbers


def on_a_taken_port() -> str:
    """Returns the error of a training whose port is taken."""
    import socket

    model = linear()
    x, y = problem(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        exporter = PrometheusExporter(taken.getsockname()[1])
        try:
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[exporter])
        except OSError as error:
            return str(error)
    return ""
