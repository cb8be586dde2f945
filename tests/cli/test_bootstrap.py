"""Checks `tools/bootstrap`: from a copy of the checkout and empty caches to an environment."""

import os
import re
import shutil
import subprocess

import pytest

from tests.harness.command import ROOT

pytestmark = pytest.mark.slow


def bootstrap(checkout, home, script="tools/bootstrap"):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "VIRTUAL_ENV"))}
    return subprocess.run(
        ["bash", "-c", f"exec '{checkout}/{script}' <&-"],  # Standard input is closed.
        cwd="/",
        env={**variables, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=3600,
    )


def test_fresh_checkout(tmp_path):
    checkout, home = tmp_path / "a checkout", tmp_path / "home"
    home.mkdir()
    left_out = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "demo", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=left_out)

    first = bootstrap(checkout, home)
    assert first.returncode == 0, first.stderr
    assert "Built and installed Horovod" in first.stderr
    wheels = list((home / ".cache" / "tfdml" / "wheels").glob("*/horovod-*.whl"))
    assert len(wheels) == 1
    assert not list((home / ".cache" / "tfdml").glob("build-*"))

    second = bootstrap(checkout, home)
    assert second.returncode == 0, second.stderr
    assert "Installing" not in second.stderr
    assert "Building" not in second.stderr

    done = subprocess.run(
        [checkout / ".venv" / "bin" / "tfdml", "doctor"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_broken_package_list_shows_the_log(tmp_path):
    checkout, home = tmp_path / "checkout", tmp_path / "home"
    home.mkdir()
    (checkout / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/bootstrap"):
        shutil.copy2(ROOT / name, checkout / name)
    setup = (ROOT / "setup.py").read_text()
    (checkout / "setup.py").write_text(setup + "\nraise RuntimeError('broken on purpose')\n")
    done = bootstrap(checkout, home)
    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    assert "The whole log is" in done.stderr


def test_no_supported_python(tmp_path, commands):
    checkout = tmp_path / "checkout"
    (checkout / "tools").mkdir(parents=True)
    for name in ("setup.py", "tools/bootstrap"):
        shutil.copy2(ROOT / name, checkout / name)
    names = ("bash", "dirname", "env", "sed", "id", "tail", "mkdir", "date", "cat")
    path = commands(**dict.fromkeys(names), python3="exit 1", nope="exit 1")
    done = subprocess.run(
        [checkout / "tools" / "bootstrap"],
        env={"PATH": str(path), "HOME": str(tmp_path), "PYTHON": "nope"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    supported = re.search(r'python_requires="(.+)"', (ROOT / "setup.py").read_text()).group(1)
    assert f"Python {supported} must be installed" in done.stderr
    assert "PYTHON=nope" in done.stderr
