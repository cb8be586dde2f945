"""Checks `tfdml test`: correct strategies, tampered gradients, failures, and leftovers."""

import base64
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from tests.harness.command import ROOT
from tests.harness.ssh_lab import run_on_hosts
from tfdml.cli.selftest import jobs
from tfdml.cli.selftest.comparison import Outcome, RunResult, error_lines, judge
from tfdml.cli.selftest.events import Event, Reader
from tfdml.cli.selftest.jobs import JobResult
from tfdml.cli.selftest.report import table
from tfdml.runtime.launch.processes import alive, process_tree
from tfdml.topology import child_environment

TEST = [sys.executable, "-m", "tfdml.cli.main", "test"]
ALL_RUNS = {
    "one_process",
    "mirrored",
    "multi_worker_mirrored",
    "compressed",
    "horovod",
    "parameter_server",
    "asynchronous",
}
RUNS = {run.name: run for job in (jobs.REFERENCE, *jobs.JOBS) for run in job.runs}

# Python imports a module of this name at startup. Only rank 1's program is changed.
TAMPERED = """
import json, os, sys
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
if sys.orig_argv[1:3] == ["-m", "tfdml.cli.selftest.program"] and config:
    from tfdml.collectives.tensorflow import TensorFlowCollective
    exchange = TensorFlowCollective.all_reduce
    def tampered(self, tensors, name):
        wrong = 1.01 if self.rank == 1 and "/bucket_" in name else 1
        before, after = (wrong, 1) if os.environ["TFDML_TEST_TAMPER"] == "gradient" else (1, wrong)
        sums = exchange(self, [t * before for t in tensors] if before != 1 else tensors, name)
        return [t * after for t in sums] if after != 1 else sums
    TensorFlowCollective.all_reduce = tampered
"""

BROKEN = """
import os, sys
if sys.orig_argv[1:3] == ["-m", "tfdml.cli.selftest.program"] and (
    '"index": 1' in os.environ.get("TF_CONFIG", "")
):
    import tfdml
    def broken():
        raise ConnectionError("the network card is gone")
    tfdml.MultiWorkerMirroredStrategy = broken
"""


def event(run: str, rank: int = 0, losses=(2.0, 1.0), weights=(1.0, 2.0), digest="a") -> Event:
    encoded = base64.b64encode(np.array(weights, "<f4").tobytes()).decode()
    return Event(run, rank, list(losses), 100.0, [digest], encoded if rank == 0 else "")


def judged(name: str, *events: Event, ranks: int = 2, errors: str = "", code: int = 0) -> RunResult:
    ended = JobResult(code, list(events), errors, False)
    return judge(RUNS[name], ended, ranks, ranks, event("one_process"))


def test_events_survive_a_launchers_output(capsys):
    sent = event("horovod", weights=np.arange(5000))
    Event("horovod").send()
    sent.send()
    lines = capsys.readouterr().out.splitlines(keepends=True)
    # POSIX: a pipe keeps each of these in one piece, with the prefix of its rank.
    assert max(map(len, lines)) < 4096 - 100
    reader = Reader()
    read = [reader.read(f"[0]<stdout>:{line}") for line in lines]
    assert [event for events, _ in read for event in events] == [Event("horovod"), sent]
    assert {rest for _, rest in read} == {"[0]<stdout>:\n"}
    assert reader.read("a line of TensorFlow\n") == ([], "a line of TensorFlow\n")


def test_equal_results_pass():
    name = "multi_worker_mirrored"
    result = judged(name, event(name, weights=(1.0, 2.00001)), event(name, 1))
    assert result.status is Outcome.RIGHT
    assert 0 < result.off_by < 2e-5


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event("horovod", weights=(1.0, 2.001)), event("horovod", 1)], "differ from one process"),
        ([event("horovod", losses=(2.0, 1.001)), event("horovod", 1)], "same losses"),
        ([event("horovod", weights=(1.0, np.nan)), event("horovod", 1)], "by nan"),
        ([event("horovod"), event("horovod", 1, digest="b")], "not bit-identical"),
    ],
)
def test_different_results_fail(events, reason):
    result = judged("horovod", *events)
    assert result.status is Outcome.WRONG
    assert reason in result.reason


def test_approximate_runs_only_have_to_train():
    assert judged("asynchronous", event("asynchronous"), ranks=1).status is Outcome.TRAINED
    grows = event("asynchronous", losses=(1.0, 2.0))
    assert judged("asynchronous", grows, ranks=1).status is Outcome.WRONG


def test_a_rank_that_does_not_report_has_failed():
    errors = (
        "[1] Traceback (most recent call last):\n"
        '[1]   File "program.py", line 1\n'
        "[1] ConnectionError: no route to node2\n"
        "tfdml launch: rank 1 failed: exit code 1. Its last lines:\n"
    )
    result = judged("horovod", event("horovod"), errors=errors, code=1)
    assert result.status is Outcome.FAILED
    assert "exit code 1" in result.reason
    assert result.error[0] == "ConnectionError: no route to node2"


@pytest.mark.parametrize("prefix", ["", "[0] ", "[1]<stderr>:", "[worker 1] "])
def test_the_first_lines_of_an_error(prefix):
    noise = "I0000 00:00:1700000000.000000 123 port.cc:153] oneDNN custom operations are on."
    written = [noise, "  File x", "ValueError: `a` must", "b", "Traceback (most recent call last):"]
    text = "\n".join(f"{prefix}{line}" for line in written)
    assert error_lines(text) == ["ValueError: `a` must", "b"]
    assert error_lines(f"{prefix}only\n{prefix}this") == ["only", "this"]


def test_the_table_fits_80_columns():
    numbers = {"replicas": 128, "off_by": 1.2e-07, "samples_per_second": 1234567.0}
    results = [RunResult(run, Outcome.NOT_INSTALLED, **numbers) for run in RUNS.values()]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(results))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + len(RUNS)
    assert all(run.label in line for run, line in zip(RUNS.values(), lines[1:], strict=True))
    assert all("1,234,567" in line and "1.00x" in line for line in lines[1:])


def test_a_missing_directory_is_found_before_training(tmp_path):
    command = [*TEST, "--json", str(tmp_path / "none" / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "`json` must be in a directory" in done.stderr


def run_test(tmp_path, *options: str, timeout: float = 400, **variables: str):
    """Runs `tfdml test`; returns the finished process and the status of each run."""
    file = tmp_path / "results.json"
    done = subprocess.run(
        [*TEST, *options, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=child_environment(COLUMNS="80", **variables),
    )
    assert file.exists(), done.stdout + done.stderr
    runs = json.loads(file.read_text())["runs"]
    return done, {run["run"]: run for run in runs}


@pytest.mark.slow
def test_two_workers_pass(tmp_path):
    done, runs = run_test(tmp_path, "--only", "multi_worker_mirrored", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: run["status"] for name, run in runs.items()} == {
        "one_process": "right",
        "multi_worker_mirrored": "right",
        "compressed": "right",
    }
    # Different sums: equal ones would be those of one process.
    assert 0 < runs["multi_worker_mirrored"]["off_by"] < runs["compressed"]["off_by"]
    assert done.stdout.splitlines()[:3] == [
        "Training: one process, plain Keras, on this machine",
        "Training: MultiWorkerMirroredStrategy, on this machine",
        'Training: MultiWorkerMirroredStrategy(compression="qsgd"), on this machine',
    ]
    assert done.stdout.splitlines()[-1] == "All tested strategies train right here."
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gradient", "sum"])
def test_a_tampered_exchange_is_reported(tmp_path, what):
    (tmp_path / "sitecustomize.py").write_text(TAMPERED)
    done, runs = run_test(
        tmp_path,
        "--only",
        "multi_worker_mirrored",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        TFDML_TEST_TAMPER=what,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert runs["one_process"]["status"] == "right"
    assert runs["multi_worker_mirrored"]["status"] == "wrong"
    reason = "differ from one process's" if what == "gradient" else "not bit-identical"
    assert reason in runs["multi_worker_mirrored"]["reason"]
    assert "MultiWorkerMirroredStrategy is wrong: " in done.stdout
    assert "-m tfdml.cli.selftest.program multi_worker_mirrored" in done.stdout
    assert "train right here" not in done.stdout


@pytest.mark.slow
def test_a_rank_that_dies_is_reported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done, runs = run_test(
        tmp_path, "--only", "multi_worker_mirrored", PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert runs["multi_worker_mirrored"]["status"] == "failed"
    assert runs["compressed"]["status"] == "not run"
    assert "    ConnectionError: the network card is gone" in done.stdout


@pytest.mark.slow
def test_all_strategies(tmp_path):
    done, runs = run_test(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(runs) == ALL_RUNS
    assert {run["status"] for run in runs.values()} == {"right", "loss fell"}
    assert all(run["samples_per_second"] > 0 for run in runs.values())
    assert done.stdout.splitlines()[-1] == "All installed strategies train right here."
    assert len(done.stdout.splitlines()) <= 24
    assert done.stderr == ""


@pytest.mark.slow
def test_without_horovod(environment_without, tmp_path):
    python = environment_without("horovod")
    done = subprocess.run(
        [python, *TEST[1:], "--only", "horovod"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "To install it: tfdml build-horovod" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_on_two_hosts(tmp_path):
    command = [*TEST, "--hosts", "host0:1,host1:1", "--only", "multi_worker_mirrored"]
    ended = run_on_hosts(tmp_path, 2, [*command, "--only", "horovod"], child_environment(), 400)
    assert ended.ok, ended.output
    assert "HorovodStrategy, on host0:1,host1:1" in ended.output
    assert ended.output.splitlines()[-1] == "All tested strategies train right here."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_after_termination(number):
    running = subprocess.Popen(
        [*TEST, "--only", "mirrored"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(family := process_tree(running.pid)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == (130 if number == signal.SIGINT else -9)
    assert ("interrupted" in errors) == (number == signal.SIGINT)
    while left := alive(family):
        assert time.monotonic() < deadline + 60, left
        time.sleep(0.1)
