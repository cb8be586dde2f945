"""Checks `tools/test` and `tools/bootstrap`: their options and error messages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.checkouts import ROOT, copy_of_the_checkout


def run(tool: str, *arguments: str, root: Path = ROOT, timeout: float = 60, **variables: str):
    return subprocess.run(
        [root / "tools" / tool, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_help_has_no_side_effects(tmp_path):
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    done = run("test", "--help", root=checkout)
    assert done.returncode == 0
    options = re.findall(r"^  (--\w+) ", done.stdout, re.MULTILINE)
    assert options == ["--all", "--docs", "--lint", "--versions", "--help"]
    assert not list(checkout.glob(".venv*"))


def test_help_of_docs_sets_nothing_up(tmp_path):
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    done = run("docs", "--help", root=checkout)
    assert done.returncode == 0
    assert re.findall(r"^  (--\w+) ", done.stdout, re.MULTILINE) == ["--pages", "--help"]
    done = run("docs", "--fast", root=checkout)
    assert done.returncode == 2
    assert "must be --pages or --help. Received: --fast" in done.stderr
    assert not list(checkout.glob(".venv*"))


@pytest.mark.parametrize(
    ("arguments", "received"),
    [(["--everything"], "--everything"), (["--environment"], "none"), (["x"], "x")],
)
def test_bootstrap_rejects_unknown_arguments(arguments, received):
    done = run("bootstrap", *arguments)
    assert done.returncode == 1
    assert "must " in done.stderr
    assert f"Received: {received}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (["--keras"], "none"),
        (["--keras", "3"], "3"),
        (["--tensorflow", "2.20.0"], "2.20.0"),
        (["--tensorflow", "newest", "--all"], "newest"),
    ],
)
def test_malformed_version_is_rejected(arguments, received):
    done = run("bootstrap", *arguments)
    assert done.returncode == 1
    message = (
        f"{arguments[0]} must have a minor version, such as 3.14 or 2.20. Received: {received}"
    )
    assert message in done.stderr


def test_no_python_for_versions():
    done = run("test", "--versions", PYTHON="/nowhere/python3")
    assert done.returncode == 1
    assert "must have a supported Python. Received: /nowhere/python3 does not run." in done.stderr


def test_version_suites_exist():
    text = (ROOT / "tools" / "test").read_text(encoding="utf-8")
    suites = re.search(r"SUITES=\((.*?)\)", text, re.DOTALL).group(1).split()
    assert suites
    assert all((ROOT / name).exists() for name in suites)


@pytest.mark.slow
def test_lint_alone(tmp_path):
    """It needs only Python, and finds an error."""
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    done = run("test", "--lint", root=checkout, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [p.name for p in checkout.glob(".venv*")] == [".venv-lint"]
    (checkout / "tfdml" / "wrong.py").write_text('"""A module."""\n\nimport os\n')
    done = run("test", "--lint", root=checkout, timeout=300)
    assert done.returncode != 0
    assert "`os` imported but unused" in done.stdout


@pytest.mark.slow
def test_an_environment_for_a_pair(tmp_path):
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    # Lists the tests with the new environment's pytest.
    done = run(
        *("test", "--versions", "3.14", "2.20", "--collect-only", "-q"),
        root=checkout,
        timeout=1500,
        PYTHON=python,
    )
    version = "{}.{}".format(*sys.version_info)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"== Keras 3.14, TensorFlow 2.20, Python {version}" in done.stdout
    assert "tests/data/test_pipeline.py" in done.stdout
    environment = checkout / f".venv-{version}-keras3.14-tensorflow2.20"
    assert list(checkout.glob(".venv*")) == [environment]
    assert installed(environment) == ["keras 3.14", "tensorflow-cpu 2.20"]
    # Run again without a version, it changes no version and installs nothing else.
    again = run("bootstrap", "--environment", environment.name, root=checkout, timeout=600)
    assert again.returncode == 0, again.stderr
    assert installed(environment) == ["keras 3.14", "tensorflow-cpu 2.20"]


def installed(environment: Path) -> list[str]:
    """Returns the minor versions of Keras and of every TensorFlow in an environment."""
    listed = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "list", "--format=freeze"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.findall(r"^(keras|tensorflow|tensorflow.cpu)==(\d+\.\d+)", listed, re.MULTILINE)
    return [f"{name.replace('_', '-')} {minor}" for name, minor in found]
