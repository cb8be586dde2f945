"""Checks `tfdml doctor` on healthy and broken environments."""

import json
import os
import platform
import re
import socket

import psutil
import pytest
from rich.console import Console

from tests.harness.command import ROOT, run_python
from tfdml import topology
from tfdml.cli import doctor
from tfdml.cli.checks import devices, network, settings, versions
from tfdml.cli.checks.all_reduce import check_all_reduce
from tfdml.cli.checks.finding import Finding, Status, error, ok, warning
from tfdml.cli.checks.job import check_job
from tfdml.horovod_build.requirements import installed_tensorflows

WIDE = {"COLUMNS": "200"}


def row(output: str, name: str) -> str:
    """Returns a finding's line; words of other findings' fixes may be its name."""
    pattern = re.compile(rf"\s*(ok|warning|error)\s+{re.escape(name)}\s")
    return next(line for line in output.splitlines() if pattern.match(line))


def shown(findings: list[Finding], verbose: bool = False, width: int = 100) -> list[str]:
    """Returns the lines that `doctor` prints for some findings."""
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    doctor.show(console, findings, verbose)
    return console.export_text().splitlines()


def test_problems_come_first_with_their_fixes():
    lines = shown(
        [ok("Python", "3.11"), warning("Name", "odd", "Change it: a"), error("A", "b", "c")]
    )
    assert [line.split() for line in lines[:5]] == [
        ["error", "A", "b"],
        ["c"],
        ["warning", "Name", "odd"],
        ["Change", "it:", "a"],
        ["ok", "Python", "3.11"],
    ]
    assert any("Training does not work here yet" in line for line in lines)


def test_long_output_is_shown_by_verbose_only():
    failed = [error("All-reduce", "\n".join(f"line {i}" for i in range(20)), "fix it")]
    assert len(shown(failed)) < 10 < 20 < len(shown(failed, verbose=True))
    assert any("fix it" in line for line in shown(failed))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100])
def test_output_fits_a_screen(tfdml_command, columns):
    done = tfdml_command("doctor", COLUMNS=str(columns))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert 12 <= len(lines) <= 24
    assert max(map(len, lines)) <= columns
    assert row(done.stdout, "All-reduce").startswith("ok ")
    # The fix for who trains under TensorFlow's strategies, which crash or are refused.
    assert "With Keras 3 use" in done.stdout
    assert "tfdml.MultiWorkerMirroredStrategy" in done.stdout
    assert "tfdml.ParameterServerStrategy" in done.stdout


def test_a_broken_strategy_is_replaced_by_ours_of_the_same_name():
    instead = {what: ours for what, _, ours in versions.known_problems()}
    for name in ("MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        (ours,) = [ours for what, ours in instead.items() if f"tf.distribute.{name}" in what]
        assert ours == f"tfdml.{name}"


@pytest.mark.slow  # The test above runs it too.
def test_healthy_machine(tfdml_command):
    done = tfdml_command("doctor", "--verbose", TF_ENABLE_ONEDNN_OPTS="1", **WIDE)
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("Python", "TensorFlow", "Keras", "tf.keras", "Horovod", "Codecs", "Devices")
    for name in (*names, "All-reduce"):
        assert row(done.stdout, name).startswith("ok ")
    assert "gloo" in row(done.stdout, "Horovod")
    assert "MiB between 2 processes in" in row(done.stdout, "All-reduce")
    for thread in ("keras#20585", "keras#18624", "horovod#4290", "horovod#4302"):
        assert thread in done.stdout


def test_without_horovod(environment_without, tfdml_command):
    python = environment_without("horovod")
    done = tfdml_command("doctor", python=python, **WIDE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert row(done.stdout, "Horovod").startswith("warning ")
    assert "not installed: only HorovodStrategy needs it" in row(done.stdout, "Horovod")
    fix = (
        "Train without it under tfdml.MultiWorkerMirroredStrategy or tfdml.ParameterServerStrategy"
    )
    assert f"{fix}, or build it: tfdml build-horovod" in done.stdout
    assert "All-reduce" not in done.stdout
    assert row(done.stdout, "TensorFlow").startswith("ok ")


@pytest.mark.slow  # `test_without_horovod` imports tfdml there.
def test_without_horovod_one_process_works(environment_without):
    code = "import tfdml; s = tfdml.HorovodStrategy(); print(s.rank, s.size, s.is_chief)"
    done = run_python("-c", code, python=environment_without("horovod"))
    assert done.stdout.split() == ["0", "1", "True"], done.stderr


def test_broken_tensorflow(environment_without, tfdml_command):
    done = tfdml_command("doctor", python=environment_without("horovod", "absl"), **WIDE)
    assert done.returncode == 1
    assert row(done.stdout, "Devices").startswith("error ")
    assert "No module named 'absl'" in done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere TensorFlow has its own")
@pytest.mark.parametrize(("value", "status"), [("0", Status.WARNING), ("1", Status.OK)])
def test_onednn(monkeypatch, value, status):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", value)
    finding = devices.check_devices()
    assert finding.status is status
    assert ("without oneDNN" in finding.what) == (value == "0")
    assert ("TF_ENABLE_ONEDNN_OPTS=1" in finding.fix) == (value == "0")


def test_time_limit_of_the_all_reduce():
    finding = check_all_reduce(["gloo"], seconds=0.5)
    assert finding.status is Status.ERROR
    assert "not finished after" in finding.what
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if _is_worker(p)]
    assert left == []


def _is_worker(process: psutil.Process) -> bool:
    return "tfdml.cli.checks.all_reduce" in " ".join(process.info["cmdline"] or ())


@pytest.mark.parametrize(("value", "status"), [("1", "error"), ("True", "error"), ("0", "ok")])
def test_legacy_keras(monkeypatch, value, status):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    finding = settings.check_legacy_keras()
    assert finding.status.value == status
    assert bool(finding.fix) == (status == "error")


def test_backend(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    assert settings.check_backend().status is Status.OK
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert settings.check_backend().status is Status.ERROR
    assert "keras.json" in settings.check_backend().what
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert settings.check_backend().status is Status.OK
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert settings.check_backend().status is Status.ERROR


@pytest.mark.parametrize(
    ("name", "status", "part"),
    [
        ("localhost", Status.WARNING, "only this machine"),
        ("no-such-host.invalid", Status.ERROR, "does not resolve"),
        ("203.0.113.7", Status.ERROR, "cannot listen"),
    ],
)
def test_host_name(name, status, part):
    finding = network.check_host_name(name)
    assert finding.status is status
    assert part in finding.what
    assert f" {name}`" in finding.fix


def test_host_name_reachable_by_others():
    assert all(socket.inet_aton(a) for a in network.reachable_addresses())
    for address in network.reachable_addresses()[:1]:
        assert network.check_host_name(address).status is Status.OK


@pytest.mark.parametrize(
    ("local", "size", "is_hierarchical"),
    [(2, 4, True), (4, 4, False), (1, 4, False)],
)
def test_job(local, size, is_hierarchical):
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"]
    values = ["0", str(size), "0", str(local)]
    environment = {f"HOROVOD_{n}": v for n, v in zip(names, values, strict=True)}
    found = check_job(environment)
    assert found.status is Status.OK
    assert f"{size} processes, {local} of them on this host" in found.what
    assert ("summed on each host first" in found.what) is is_hierarchical


def test_job_of_tfdml_launch():
    cluster = {"worker": [f"a:{port}" for port in range(3)] + ["b:1"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    environment = {"TF_CONFIG": json.dumps(task), **topology.local_variables(1, 3)}
    assert "4 processes, 3 of them on this host" in check_job(environment).what
    assert check_job({}) is None


def test_ranges_come_from_the_installed_metadata():
    ranges = versions.supported_ranges()
    assert set(ranges) == {"python", "tensorflow", "keras"}
    assert "3.11" in ranges["python"]
    assert "3.9" not in ranges["python"]


def test_version_outside_of_the_range(monkeypatch):
    monkeypatch.setattr(versions.platform, "python_version", lambda: "3.9.1")
    finding = versions.check_python()
    assert finding.status is Status.WARNING
    assert "3.9.1" in finding.what
    assert "supported versions" in finding.fix


@pytest.mark.slow
def test_two_tensorflows(tfdml_command, tmp_path):
    """pip allows `tensorflow-cpu` on top of `tensorflow`; here only the metadata of one exists."""
    names = [found.distribution for found in installed_tensorflows()]
    other = next(n for n in ("tensorflow", "tensorflow-cpu") if n not in names)
    noted = tmp_path / f"{other.replace('-', '_')}-2.21.0.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {other}\nVersion: 2.21.0\n")
    done = tfdml_command("doctor", PYTHONPATH=f"{tmp_path}:{ROOT}", **WIDE)
    assert done.returncode == 1
    assert row(done.stdout, "TensorFlow").startswith("error ")
    assert f"{other} 2.21.0" in row(done.stdout, "TensorFlow")
    assert "Keep one: pip uninstall" in done.stdout
    assert versions.check_tensorflow().status is Status.OK


def test_host():
    finding = devices.check_host()
    assert f"{psutil.cpu_count()} cores" in finding.what
