"""Checks that the command line and the package start fast and document themselves."""

import numpy as np
import pytest

import tfdml
from tests.cli.test_help import pages
from tests.harness.command import run_python
from tfdml import checkpointing

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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a directory with records, a checkpoint and a script."""
    root = tmp_path_factory.mktemp("files")
    (root / "people.csv").write_text("name,age\nA,31\nB,32\n")
    command = ("-m", "tfdml.cli.main", "records", "convert", str(root / "people.csv"))
    assert run_python(*command, "-o", str(root / "people")).returncode == 0
    manifest = checkpointing.CheckpointManifest(0, 1, 5, 1, (), {})
    checkpointing.save(
        checkpointing.Files(), str(root / "run1"), "job", 0, manifest, {"model/0": np.zeros(3)}, {}
    )
    (root / "train.py").write_text("print('trained')")
    return root


@pytest.mark.parametrize(
    "command",
    [
        "records convert {}/people.csv -o {}/again",
        "records inspect {}/people",
        "records verify {}/people",
        "checkpoints inspect {}/run1",
        "launch --workers 2 --print-slurm {}/train.py",
        "launch --workers 2 --ps 1 --print-kubernetes {}/train.py",
        "launch --workers 1 {}/train.py",
    ],
)
def test_commands_on_files_do_not_wait_for_tensorflow(files, command):
    """TensorFlow alone takes seconds to import."""
    words = command.format(files, files).split()
    done = run_python("-X", "importtime", "-m", "tfdml.cli.main", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert f"tfdml.cli.{words[0]}" in imported
    assert not imported & {"tensorflow", "keras", "horovod", "matplotlib"}


def test_help_names_every_command(tfdml_command):
    text = tfdml_command("--help").stdout
    assert "build-horovod" in text
    assert "doctor" in text
    assert "launch" in text


def test_help_of_build_teaches(tfdml_command):
    text = " ".join(tfdml_command("build-horovod", "--help", COLUMNS="200").stdout.split())
    assert text.count("Untested") == text.count("not run on several GPUs") == 1
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
