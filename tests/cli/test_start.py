"""Checks that the command line and the package start fast and document themselves."""

import pytest

import tfdml
from tests.cli.test_help import pages
from tests.harness.command import run_python

HEAVY = ("tensorflow", "keras", "horovod", "matplotlib", "numpy", "psutil", "fsspec", "filelock")
COMMANDS = list(pages())


def test_import_loads_nothing_heavy():
    code = f"import tfdml, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"


def test_help_of_every_command_loads_nothing_heavy():
    """One process shows all help pages: what it has imported then, one of them needs."""
    code = f"""
import contextlib, io, sys
from tfdml.cli.main import app
for path in {COMMANDS}:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        app([*path, "--help"], standalone_mode=False)
    assert "Usage:" in shown.getvalue(), path
print([m for m in {HEAVY} if m in sys.modules])
"""
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_of_an_installed_command_loads_nothing_heavy():
    done = run_python("-X", "importtime", "-m", "tfdml.cli.main", "launch", "--help")
    assert done.returncode == 0, done.stderr
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "tfdml.cli.launch" in imported
    assert not imported & set(HEAVY)


def test_help_names_every_command(tfdml_command):
    text = tfdml_command("--help").stdout
    assert "build-horovod" in text
    assert "doctor" in text
    assert "launch" in text


def test_help_of_build_teaches(tfdml_command):
    text = " ".join(tfdml_command("build-horovod", "--help", COLUMNS="200").stdout.split())
    assert text.count("Untested") == text.count("not run on a GPU") == 1
    assert "Other nodes" in text
    assert "--wheel-dir" in text


def test_no_command_shows_help(tfdml_command):
    assert "build-horovod" in tfdml_command().stdout


def test_version(tfdml_command):
    assert tfdml_command("--version").stdout.strip() == f"tfdml {tfdml.__version__}"


def test_public_names_are_those_of_the_modules():
    from tfdml import strategies

    assert tfdml.strategies is strategies
    assert tfdml.HorovodStrategy is strategies.HorovodStrategy
    assert set(tfdml.__all__) <= set(dir(tfdml))


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'HorovodStrategie'"):
        tfdml.HorovodStrategie  # noqa: B018
