"""Checks what `PrometheusExporter` serves, by Prometheus's own client and by a real Prometheus."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.callbacks import exporter_cases as cases
from tfdml.callbacks import PrometheusExporter

COUNTERS = {
    *(f"tfdml_{n}_seconds_total" for n in ("step", "compute", "exchange", "wait", "data_wait")),
    "tfdml_caused_wait_seconds_total",
    "tfdml_checkpoint_stall_seconds_total",
    "tfdml_samples_total",
    "tfdml_steps_total",
}
GAUGES = {"tfdml_epoch", "tfdml_memory_bytes"}
WITH_METRICS = {"tfdml_gradient_norm", "tfdml_gradient_bytes_sent_total"}


def free_ports() -> int:
    """Returns a port that is free, like the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_each_rank_serves_its_own_numbers(ranks):
    """Read in the middle of the second epoch, and not reachable after the end."""
    port = free_ports()
    found = ranks(2).run(cases.scraped, port)
    targets = f"tfdml: Prometheus targets: 127.0.0.1:{port}, 127.0.0.1:{port + 1}"
    assert [targets in rank["printed"] for rank in found] == [True, False]
    for rank, own in enumerate(found):
        numbers = own["numbers"]
        assert {name for name, _ in numbers} - {"tfdml_epoch_log"} == {
            *COUNTERS,
            *GAUGES,
            *WITH_METRICS,
        }
        values = {name: v for (name, labels), v in numbers.items() if name != "tfdml_epoch_log"}
        labels = {dict(labels)["rank"] for _, labels in numbers}
        assert labels == {str(rank)}
        # The sixth step is not over yet when its callback runs, or just over.
        assert values["tfdml_steps_total"] in (5, 6)
        assert values["tfdml_samples_total"] == 6 * values["tfdml_steps_total"]
        assert values["tfdml_epoch"] == 1
        parts = ("compute", "exchange", "wait", "data_wait")
        seconds = sum(values[f"tfdml_{part}_seconds_total"] for part in parts)
        assert 0 < seconds <= values["tfdml_step_seconds_total"] * 1.001
        assert values["tfdml_gradient_bytes_sent_total"] == values["tfdml_steps_total"] * 4800
        logs = {dict(labels)["name"]: v for (n, labels), v in numbers.items() if "log" in n}
        assert logs["loss"] == own["loss"]
        assert logs["perf/grad_norm"] > 0
        assert own["after"] == "refused"


@pytest.mark.parametrize("synchronous", [True, False])
def test_chief_serves_all_workers(cluster, synchronous):
    numbers = cluster.run(cases.scraped_chief, free_ports(), synchronous)
    of = lambda name: {dict(labels)["rank"] for n, labels in numbers if n == name}  # noqa: E731
    assert of("tfdml_compute_seconds_total") == {"0", "1"}
    assert of("tfdml_wait_seconds_total") == ({"0", "1"} if synchronous else set())
    assert of("tfdml_memory_bytes") == {"chief"}


def test_a_training_after_a_failed_one_serves_on_the_same_port(ranks):
    (numbers,) = ranks(1).run(cases.after_an_error, free_ports())
    steps = [value for (name, _), value in numbers.items() if name == "tfdml_steps_total"]
    assert steps == [4]


def test_taken_port_is_named(ranks):
    message = ranks(1).run(cases.on_a_taken_port)[0]
    assert re.search(r"`port` .* must be free on 127.0.0.1.* Received on rank 0: \d+,", message)


@pytest.mark.parametrize("port", [0, 65536, "9200"])
def test_wrong_port(port):
    with pytest.raises(ValueError, match="`port` must be from 1 to 65535. Received: port="):
        PrometheusExporter(port)


def _query(port: int, expression: str) -> list[dict]:
    """Returns the result of a query by Prometheus's HTTP interface."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=5) as page:
        return json.load(page)["data"]["result"]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
)
def test_real_prometheus_scrapes_two_ranks(tmp_path):
    """`tfdml launch` prints the targets; a Prometheus with these has rates of both ranks."""
    port, own = free_ports(), free_ports()
    program = [sys.executable, "-m", "tfdml.cli.main", "launch", "--workers", "2", "-m"]
    job = subprocess.Popen(
        [*program, "tests.callbacks.exporter_program", str(port), str(tmp_path / "stop")],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    prometheus = None
    try:
        line = next(line for line in job.stdout if "Prometheus targets: " in line)
        targets = line.partition("Prometheus targets: ")[2].strip().split(", ")
        assert targets == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        jobs = [{"job_name": "tfdml", "static_configs": [{"targets": targets}]}]
        configuration = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
        (tmp_path / "prometheus.yml").write_text(json.dumps(configuration))
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        found = _wait_for(own, "rate(tfdml_steps_total[10s]) > 0")
        assert {(r["metric"]["instance"], r["metric"]["rank"]) for r in found} == {
            (target, str(rank)) for rank, target in enumerate(targets)
        }
        assert all(float(r["value"][1]) > 0 for r in found)
        up = _query(own, "up")
        assert {r["metric"]["instance"]: r["value"][1] for r in up} == dict.fromkeys(targets, "1")
        losses = _wait_for(own, 'tfdml_epoch_log{name="loss"}')
        assert {r["metric"]["rank"] for r in losses} == {"0", "1"}
    finally:
        (tmp_path / "stop").touch()
        if prometheus is not None:
            prometheus.terminate()
            prometheus.wait(30)
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output


def _wait_for(port: int, expression: str) -> list[dict]:
    """Returns the result of a query when Prometheus has one of both ranks."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            found = _query(port, expression)
        except OSError:
            found = []
        if len(found) == 2:
            return found
        time.sleep(0.5)
    raise AssertionError(f"Prometheus has no `{expression}` of two ranks after 90 s.")
