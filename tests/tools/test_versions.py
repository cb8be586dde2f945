"""Checks the table of versions: recorded runs, complete coverage, and a single TensorFlow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.checkouts import ROOT, copy_of_the_checkout
from tests.tools.test_commands import installed, run
from tfdml.known_versions import known_releases
from tools import versions

SUITE = """
import pytest

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("here")

@pytest.fixture
def broken(): raise ValueError
def test_has_an_error(broken): pass
"""


def results_of(text: str, directory: Path, name: str) -> Path:
    """Runs pytest on a file and returns its report of the results."""
    file = directory / "test_some.py"
    file.write_text(text)
    results = directory / name
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*command, "--junitxml", results, file], cwd=directory, stdout=subprocess.PIPE)
    return results


def test_table_lists_recorded_runs():
    page = versions.PAGE.read_text(encoding="utf-8")
    assert versions.with_table(page, versions.read()) == page


def test_all_supported_versions_ran_and_passed():
    ran = {versions.pair(run) for run in versions.read()}
    keras, tensorflow = (
        sorted({versions.minor(str(r)) for r in known_releases(library)})
        for library in ("keras", "tensorflow")
    )
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    pythons = re.findall(r'Python :: (3\.\d+)"', setup)
    assert {(k, t) for k, t, _ in ran} == {(k, t) for k in keras for t in tensorflow}
    assert {python for *_, python in ran} == set(pythons)
    assert {run["failed"] for run in versions.read()} == {0}
    assert min(run["passed"] for run in versions.read()) > 100


def test_results_are_counted(tmp_path):
    first = results_of(SUITE, tmp_path, "first.xml")
    counted = versions.run([first])
    assert [counted[name] for name in ("passed", "failed", "skipped")] == [2, 2, 1]
    assert counted["python"].split(".") == [str(n) for n in sys.version_info[:3]]
    again = results_of("def test_fails(): pass", tmp_path, "again.xml")
    counted = versions.run([first, again])
    assert [counted[name] for name in ("passed", "failed", "skipped")] == [3, 1, 1]


def requirements_with(*given: str, scratch: Path) -> set[str]:
    """Returns the packages that pip would install, without installing."""
    report = scratch / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run([*command, "--report", report, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {each["metadata"]["name"].replace("_", "-").lower() for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("tensorflow", ["tensorflow", "tensorflow-cpu", "tensorflow[and-cuda]"])
def test_no_extra_brings_another_tensorflow(tensorflow, tmp_path):
    extras = "horovod,hubs,records,recipes,test"
    would = requirements_with(f"{tensorflow}>=2.20,<2.22", f"{ROOT}[{extras}]", scratch=tmp_path)
    named = re.compile(r"tensorflow(-cpu|-gpu|-rocm)?|tf-nightly(-cpu)?")
    assert {name for name in would if named.fullmatch(name)} == {tensorflow.partition("[")[0]}
    assert {"keras", "tfdml"} <= would


@pytest.mark.slow
def test_bootstrap_keeps_the_installed_tensorflow(tmp_path):
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    made = run("bootstrap", "--environment", ".venv-it", "--empty", root=checkout, timeout=300)
    assert made.returncode == 0, made.stderr
    environment = checkout / ".venv-it"
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "tensorflow==2.20.*"], check=True)
    for step in ("first", "second"):
        # Without a compiler it stops where Horovod would be built, after all packages.
        done = run(
            *("bootstrap", "--environment", environment.name),
            root=checkout,
            timeout=900,
            CXX="/nowhere/c++",
        )
        assert "A C++ compiler must be on PATH" in done.stderr
        assert ("Installing tfdml" in done.stderr) == (step == "first")
        (it,) = [name for name in installed(environment) if name.startswith("tensorflow")]
        assert it == "tensorflow 2.20"
