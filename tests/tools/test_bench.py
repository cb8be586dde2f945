"""Checks the benchmarks: each `--help`, each command named in a text, and the common harness."""

import ast
import importlib
import io
import os
import pkgutil
import platform
import re
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import pytest
import typer

from tests.tools.checkouts import ROOT, tracked_files
from tests.tools.test_netlab import needs_root
from tfdml import compression
from tools import bench
from tools.bench import harness

RANK = "tests.tools.reporting_rank"
SOURCES = {
    found.name: Path(found.module_finder.path, f"{found.name.rpartition('.')[2]}.py")
    for found in pkgutil.walk_packages(bench.__path__, "tools.bench.")
    if not found.ispkg
}
PROGRAMS = [name for name, file in SOURCES.items() if '__name__ == "__main__"' in file.read_text()]
LIBRARIES = [name for name in SOURCES if name not in PROGRAMS]
# Modules that a job runs, by the benchmark that starts it.
PARTS = {
    "tools.bench.compression.rank": "tools.bench.compression",
    "tools.bench.compression.torch_rank": "tools.bench.compression",
    "tools.bench.divided_tables.rank": "tools.bench.divided_tables",
    "tools.bench.divided_tables.torchrec_rank": "tools.bench.divided_tables",
    "tools.bench.parameter_server.chief": "tools.bench.parameter_server",
    "tools.bench.parameter_server.host": "tools.bench.parameter_server",
    "tools.bench.pipeline.first_step_job": "tools.bench.pipeline",
    "tools.bench.pipeline.tensorflow_job": "tools.bench.pipeline",
    "tools.bench.pipeline.torch_job": "tools.bench.pipeline",
    "tools.bench.recovery.rank": "tools.bench.recovery",
    "tools.bench.remat.keras_job": "tools.bench.remat",
    "tools.bench.remat.torch_job": "tools.bench.remat",
    "tools.bench.robust.job": "tools.bench.robust",
    "tools.bench.sharding.rank": "tools.bench.sharding",
    "tools.bench.sharding.torch_rank": "tools.bench.sharding",
    "tools.bench.slow_networks.loss_rank": "tools.bench.slow_networks",
    "tools.bench.slow_networks.rank": "tools.bench.slow_networks",
    "tools.bench.slow_networks.torch_rank": "tools.bench.slow_networks",
}
# Modules that start processes other than jobs, and why.
OTHER_PROCESSES = {
    "tools.bench.compression.__main__": "installs PyTorch",
    "tools.bench.divided_tables.__main__": "installs TorchRec",
    "tools.bench.divided_tables.rank": "starts a worker and a server on each host",
    "tools.bench.remat.__main__": "installs Keras on JAX",
    "tools.bench.slow_networks.__main__": "installs torchft",
    "tools.bench.parameter_server.chief": "stops a worker again and again",
}
# Names that only the harness may use.
OF_THE_HARNESS = re.compile(r"^RESULT|TF_NUM_\w+_THREADS|OMP_NUM_THREADS|^horovodrun$|^netlab$")
# A module that has been imported by another one can still run as a program.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
COMMAND = re.compile(r"python -m (tools\.bench\.[\w.]+)([^\n`]*)")


def of_source(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def help_of(monkeypatch, program: str, *command: str) -> str:
    """Runs `python -m PROGRAM ... --help` in this process; returns its output."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [program, *command, "--help"])
    output = io.StringIO()
    with redirect_stdout(output), pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    return output.getvalue()


def test_all_modules_are_found():
    assert len(PROGRAMS) > 15
    assert {"tools.bench.harness", "tools.bench.compression.model"} <= set(LIBRARIES)
    assert set(PARTS) <= set(PROGRAMS)


# -- What they tell --------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_a_description_and_a_command(monkeypatch, program):
    page = " ".join(help_of(monkeypatch, program).replace("`", "").split())
    sentence = ast.get_docstring(of_source(program)).split("\n\n")[0]
    assert " ".join(sentence.replace("`", "").split()) in page
    if program in PARTS:
        assert PARTS[program] in sentence
    else:
        # The first one is in the usage line.
        assert page.count(f"python -m {program.removesuffix('.__main__')}") >= 2


@pytest.mark.parametrize("module", LIBRARIES)
def test_libraries_have_no_command_line(module):
    """`--help` is accepted, and prints nothing."""
    importlib.import_module(module)
    ended = runpy.run_module(module, run_name="__main__")
    assert ended["__doc__"]


def commands() -> dict[tuple[str, ...], str]:
    """Returns the benchmarks' commands in all texts, with one location of each."""
    found = {}
    for name in sorted(tracked_files()):
        if name.endswith((".md", ".py")) and name != "tests/tools/test_bench.py":
            for program, rest in COMMAND.findall((ROOT / name).read_text(encoding="utf-8")):
                found[(program, *rest.partition("#")[0].split())] = name
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_in_texts_exist(monkeypatch, words):
    program, *rest = words
    if program == "tools.bench.NAME":
        return
    assert {program, f"{program}.__main__"} & set(PROGRAMS), words
    group = [word for word in rest[:1] if re.fullmatch(r"\w+", word)]
    page = help_of(monkeypatch, program, *group)
    for option in re.findall(r"--[\w-]+", " ".join(rest)):
        assert re.search(rf"{option}\b", page), option


def test_no_text_names_a_removed_benchmark():
    stale = re.compile(r"tools/(?:bench_\w+|overlap)\.py|from bench_")
    for name in tracked_files():
        if name.endswith((".md", ".py", ".toml", ".yml", ".in", ".json")):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert name == "tests/tools/test_bench.py" or not stale.search(text), name


# -- How they start jobs ---------------------------------------------------------------------------


@pytest.mark.parametrize("module", SOURCES)
def test_only_the_harness_starts_jobs(module):
    tree = of_source(module)
    attributes = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert "sys.path" not in attributes
    if module == "tools.bench.harness":
        return
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert ("subprocess" in imported) == (module in OTHER_PROCESSES)
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    texts = [text for text in texts if isinstance(text, str) and " " not in text.strip()]
    assert not [text for text in texts if OF_THE_HARNESS.search(text)]


def test_one_process_has_all_cores(tmp_path):
    (tmp_path / "1").touch()  # So the rank does not wait for another one.
    reported = harness.run_job(RANK, str(tmp_path), processes=1, timeout=60)
    assert reported["TF_NUM_INTRAOP_THREADS"] == str(os.cpu_count())


@pytest.mark.slow  # `horovodrun` imports TensorFlow, twice.
def test_ranks_share_the_cores_and_one_reports(tmp_path):
    reported = harness.run_job(RANK, str(tmp_path), processes=2, timeout=300)
    each = str(max(1, os.cpu_count() // 2))
    assert (reported["TF_NUM_INTRAOP_THREADS"], reported["OMP_NUM_THREADS"]) == (each, each)
    assert {str(ROOT), str(ROOT / "recipes")} <= set(reported["path"])
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}


def test_workers_end_after_the_report(tmp_path):
    reported = harness.run_workers(RANK, str(tmp_path), workers=2, timeout=60, MORE="value")
    assert reported["MORE"] == "value"
    assert not psutil.pid_exists(int((tmp_path / "1").read_text()))


def test_descendants_of_a_job_end_with_it(tmp_path):
    """Ranks outlive a launcher that is killed."""
    file = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys; child = subprocess.Popen(['sleep', '600']);"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid)); child.wait()"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        harness.result_of([sys.executable, "-c", program], harness.environment(1), timeout=5)
    child = int(file.read_text())
    # A process that nobody has waited for yet is a zombie.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@needs_root
def test_hosts_of_a_lab_report(tmp_path, capfd):
    network = {"hosts": 2, "rate": "", "network": ["--latency", "1ms", "--loss", "0.1%"]}
    reported = harness.run_on_hosts(
        RANK, str(tmp_path), **network, threads=3, timeout=60, progress=True, MORE="value"
    )
    # What a figure should tell of its network.
    assert "congestion control" in capfd.readouterr().err
    assert (reported["TF_NUM_INTRAOP_THREADS"], reported["MORE"]) == ("3", "value")
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}


def test_a_job_without_a_result_is_an_error_that_shows_its_output():
    program = "import sys; print('said'); sys.exit('no memory')"
    command = [sys.executable, "-c", program]
    pattern = r"must report a result. Received: exit code 1 (?s:.)*said\n(?s:.)*no memory"
    with pytest.raises(RuntimeError, match=pattern):
        harness.result_of(command, harness.environment(1), timeout=60)
    with pytest.raises(RuntimeError, match=r"must end without an error(?s:.)*no memory"):
        harness.finish(command, harness.environment(1), timeout=60)
    with pytest.raises(subprocess.TimeoutExpired):
        harness.finish([sys.executable, "-c", "import time; time.sleep(60)"], {}, timeout=0.5)


def test_conditions_name_installed_versions():
    found = harness.conditions(("typer", "no-such-package"))
    assert found.startswith(f"typer {version('typer')}, Python {platform.python_version()}; ")
    assert f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}; " in found
    assert re.search(r" cores, load \d+\.\d, ", harness.conditions((), load=True))


def test_networks_of_the_compression_report_are_in_order():
    from tools.bench.compression import report

    inside = [
        "100mbit x 2 x mlp",
        "1gbit x 4 x mlp",
        "1gbit 5ms x 2 x mlp",
        "1gbit 5ms 1% x 2 x mlp",
    ]
    inside += ["unshaped 5ms x 2 x mlp", "100mbit 5ms x 2*2 x mlp x XLA", "1gbit x 2 x resnet20"]
    runs = {network: {} for network in reversed(inside)}
    assert list(dict(sorted(runs.items(), key=report._order))) == inside


@pytest.mark.parametrize("name", ["fp16", "int8", "powersgd"])
def test_a_codec_can_be_timed(monkeypatch, name):
    """The benchmark calls the exchange's own functions, in both of its forms."""
    from tools.bench import codecs

    monkeypatch.setattr(codecs, "SHAPE", (64, 64))
    monkeypatch.setattr(codecs, "seconds", lambda call: (call(), 1.0)[1])
    assert codecs.measure(compression.get(name))[2] == 1.0


def test_batches_of_divided_tables_have_ids_of_each_table():
    from tools.bench.divided_tables import model

    ids, dense, y = model.batches(rows=50, ids_each=3)
    samples = (model.WARM_UP + model.STEPS) * model.BATCH
    assert ids.shape == (samples, 3 * model.TABLES)
    assert (dense.shape, y.shape) == ((samples, model.DENSE), (samples, 1))
    assert (ids.min(), ids.max()) == (0, 49)


def test_rows_per_second_are_those_of_a_call():
    from tools.bench.divided_tables import model

    calls = []
    found = model.rows_per_second(50, lambda ids: (calls.append(ids), time.sleep(0.001)))
    assert {ids.shape for ids in calls} == {(model.IDS,)}
    assert (min(map(np.min, calls)), max(map(np.max, calls))) == (0, 49)
    # Each call takes at least a millisecond.
    assert 0 < found <= model.IDS / 0.001


def test_options_that_take_names_are_checked():
    harness.check_choice("--rate", "", {"1gbit": 1e9, "": 0.0})
    harness.check_choice("--only", [], ("a", "b"))
    harness.check_choice("--only", ["b", "a"], ("a", "b"))
    message = "`--only` must be one of 'a', 'b'. Received: 'c', ''."
    with pytest.raises(typer.BadParameter, match=re.escape(message)):
        harness.check_choice("--only", ["c", "b", ""], ("a", "b"))
    with pytest.raises(typer.BadParameter, match="Received: 'ab'"):
        harness.check_choice("--rate", "ab", ("a", "b"))
