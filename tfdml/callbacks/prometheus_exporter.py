"""Each rank's own numbers for Prometheus, served while a model trains."""

import importlib.util
import socket
from collections.abc import Iterator
from typing import Any

import keras

from tfdml.callbacks.performance.hardware import gpu_peak_bytes, process_bytes
from tfdml.callbacks.performance.reader import make_reader
from tfdml.callbacks.performance.server_times import ServerTimes
from tfdml.collectives.texts import gather_texts
from tfdml.strategies import keras_seam
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.gradient_watch import GradientWatch
from tfdml.strategies.observers.step_clock import StepSums
from tfdml.strategies.replicas.rank_state import RankState

_LABELS = ["rank", "host"]
# Counters of `StepSums`: the name of each, and what it counts.
_SUMS = {
    "steps": ("tfdml_steps", "Training steps."),
    "rows": ("tfdml_samples", "Rows of the batches on which this rank worked."),
    "step": ("tfdml_step_seconds", "Time of whole steps."),
    "compute": ("tfdml_compute_seconds", "Time until this rank's gradients were ready."),
    "exchange": ("tfdml_exchange_seconds", "Time of the exchanges after that."),
    "wait": ("tfdml_wait_seconds", "Time of waiting for other ranks before an exchange."),
    "data_wait": ("tfdml_data_wait_seconds", "Time between a step and the next batch."),
    "caused": ("tfdml_caused_wait_seconds", "Time that all ranks waited for this one."),
}

# Servers and their threads by address and port. A `fit` that ends by an error, as in a notebook,
# leaves its own running, which the next one replaces.
_running: dict[tuple[str, int], tuple[Any, Any]] = {}


class PrometheusExporter(keras.callbacks.Callback):
    """Serves each rank's own numbers to Prometheus at `/metrics`, while `fit` runs.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.PrometheusExporter(port=9200)])
    ```

    The first rank of a host serves on `port`, the next one on `port + 1`, and so on; the chief of
    parameter servers serves the numbers of all workers. Rank 0 prints all addresses. Times are
    counters of seconds, of which Prometheus makes rates: `rate(tfdml_wait_seconds_total[1m]) /
    rate(tfdml_steps_total[1m])` is a rank's waiting in a step. Nothing is added to a step but the
    clock that `StepMonitor` and `PerformanceMetrics` use too: numbers are read when Prometheus
    asks for them. With `PerformanceMetrics`, the norm of the gradients and the bytes sent are
    served too. `tfdml_epoch_log` has the logs of the last epoch that has ended.

    Needs the package `prometheus_client`: `pip install 'tfdml[prometheus]'`.

    Args:
        port: The port of the first rank of each host.
        address: Address on which to serve. Everyone who can reach it can read the numbers: the
            default is reached from the same host alone.

    Raises:
        ImportError: If `prometheus_client` is not installed.
        ValueError: If `port` is not from 1 to 65535.
        OSError: When training begins, if a rank's port is taken.
    """

    def __init__(self, port: int = 9200, *, address: str = "127.0.0.1"):
        super().__init__()
        if type(port) is not int or not 1 <= port <= 65535:
            raise ValueError(f"`port` must be from 1 to 65535. Received: port={port!r}.")
        if importlib.util.find_spec("prometheus_client") is None:
            raise ImportError(
                "`PrometheusExporter` must have the package prometheus_client. Received: it is "
                "not installed. Install it: pip install 'tfdml[prometheus]'."
            )
        keras_seam.install()
        self._port, self._address = port, address
        self._served: tuple[str, int] | None = None
        self._process: list[str] = []
        self._epoch = 0
        self._logs: dict[str, float] = {}

    def set_model(self, model: keras.Model) -> None:
        """Adds a clock to the model's train step."""
        super().set_model(model)
        self._ranks = RankState(model)
        self._reader = make_reader(model)

    def on_train_begin(self, logs=None):
        """Begins to serve; rank 0 prints the addresses of all ranks."""
        if self._reader is not None:
            self._reader.begin_fit()
        collective, rank = self._ranks.collective, self._ranks.rank
        hosts = gather_texts(collective, socket.gethostname(), "prometheus/hosts")
        is_chief = isinstance(self._reader, ServerTimes)
        self._process = ["chief" if is_chief else str(rank), hosts[rank]]
        port = self._port + hosts[:rank].count(hosts[rank])
        self._serve(port)
        target = f"{self._address}:{port}"
        if len(set(hosts)) > 1:
            target += f" ({hosts[rank]})"
        targets = gather_texts(collective, target, "prometheus/targets")
        if rank == 0:
            print(f"tfdml: Prometheus targets: {', '.join(targets)}", flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch
        if self._reader is not None:
            self._reader.begin_epoch()

    def on_epoch_end(self, epoch, logs=None):
        """Notes the epoch's logs."""
        self._logs = {name: float(value) for name, value in (logs or {}).items()}

    def on_train_end(self, logs=None):
        """Ends serving."""
        _stop(self._served)

    def get_state(self) -> dict[str, Any]:
        """Returns nothing: checkpoints keep no times of an earlier process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores nothing; see `get_state`."""

    def collect(self) -> Iterator[Any]:
        """Yields the numbers now; called by Prometheus's client for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        ranks = {} if self._reader is None else self._reader.so_far()
        for name, (metric, text) in _SUMS.items():
            family = CounterMetricFamily(metric, text, labels=_LABELS)
            for rank, value in _known(ranks, name).items():
                family.add_metric([str(rank), self._reader.hosts[rank]], value)
            yield family
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for kind, metric, text, value in self._of_process():
            family = kinds[kind](metric, text, labels=_LABELS)
            family.add_metric(self._process, value)
            yield family
        ended = GaugeMetricFamily(
            "tfdml_epoch_log", "Logs of the last epoch that has ended.", labels=["name", *_LABELS]
        )
        for name, value in self._logs.items():
            ended.add_metric([name, *self._process], value)
        yield ended

    def _of_process(self) -> Iterator[tuple[str, str, str, float]]:
        """Yields the kind, name, description and value of this process's own numbers."""
        session = get_session(self.model)
        yield "gauge", "tfdml_epoch", "Index of the epoch.", self._epoch
        text = "Time for which checkpoints kept training waiting."
        yield "counter", "tfdml_checkpoint_stall_seconds", text, session.checkpoint_stall
        memory, gpu_peak = process_bytes(), gpu_peak_bytes()
        if memory is not None:
            yield "gauge", "tfdml_memory_bytes", "Main memory of this process.", memory
        if gpu_peak is not None:
            yield "gauge", "tfdml_gpu_peak_bytes", "Most memory held on a GPU so far.", gpu_peak
        watch = session.observer(GradientWatch)
        if watch is not None:
            read = watch.read()
            yield "gauge", "tfdml_gradient_norm", "Norm of the gradients.", read.norm
            text = "Bytes sent for gradients."
            yield "counter", "tfdml_gradient_bytes_sent", text, read.sent

    def _serve(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        self._served = self._address, port
        _stop(self._served)
        try:
            _running[self._served] = start_http_server(port, self._address, registry)
        except OSError as error:
            raise OSError(
                f"`port` and the ports after it must be free on {self._address}, one for each rank "
                f"of a host. Received on rank {self._ranks.rank}: {port}, {error}. Choose another "
                f"`port`."
            ) from error


def _stop(served: tuple[str, int] | None) -> None:
    """Ends the server of an address and a port, if this process has one."""
    if served in _running:
        server, thread = _running.pop(served)
        server.shutdown()
        server.server_close()
        thread.join()


def _known(ranks: dict[int, StepSums], name: str) -> dict[int, float]:
    """Returns a sum of each rank, without those that cannot be known."""
    if name == "caused":
        # Ranks that do not wait for each other cause no waiting.
        return {r: float(s.caused[r]) for r, s in ranks.items() if s.wait is not None}
    return {r: getattr(s, name) for r, s in ranks.items() if getattr(s, name) is not None}
