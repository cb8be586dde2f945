"""Checks compiling the operations: their location, and the messages of failures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfdml
from tfdml.horovod_build import BuildError
from tfdml.native import build, library


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Redirects the compiled operations to the test's directory."""
    target = tmp_path / "kept" / "operations-2.21.0-0.so"
    target.parent.mkdir()
    monkeypatch.setattr(library, "path", lambda: target)
    return target


def test_operations_are_compiled_once_and_load(elsewhere):
    old = elsewhere.with_name("operations-2.21.0-1.so")
    old.write_bytes(b"of older sources")
    other = elsewhere.with_name("operations-2.20.0-0.so")
    other.write_bytes(b"of another environment's TensorFlow")
    assert build.build() == (elsewhere, True)
    assert set(elsewhere.parent.iterdir()) == {elsewhere, other}
    assert build.build() == (elsewhere, False)
    code = f"import tensorflow as tf; print(tf.load_op_library({str(elsewhere)!r}).tfdml_encode)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "tfdml_encode" in done.stdout, done.stderr


def test_compiler_errors_are_reported(elsewhere, monkeypatch, tmp_path):
    broken = tmp_path / "broken.cc"
    broken.write_text("int main() { return missing; }")
    monkeypatch.setattr(library, "SOURCES", (broken,))
    with pytest.raises(BuildError, match="missing"):
        build.build()
    assert list(elsewhere.parent.iterdir()) == []


def test_without_a_compiler(elsewhere, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="compiler must be on PATH"):
        build.build()


def test_old_processor_is_reported(elsewhere, monkeypatch):
    monkeypatch.setattr(library, "supports_processor", lambda: False)
    with pytest.raises(BuildError, match="must have AVX2 and FMA"):
        build.build()
    library.load.cache_clear()
    assert library.load() is None
    library.load.cache_clear()


def test_the_name_follows_from_the_sources(monkeypatch, tmp_path):
    before = library.path()
    assert before == library.path()
    changed = tmp_path / "changed.cc"
    changed.write_bytes(library.SOURCES[0].read_bytes() + b"// more")
    monkeypatch.setattr(library, "SOURCES", (changed, *library.SOURCES[1:]))
    assert library.path() != before


@pytest.mark.slow
def test_doctor_reports_compiled_operations(tmp_path):
    package = Path(tfdml.__file__).parent
    shutil.copytree(package, tmp_path / "tfdml", ignore=shutil.ignore_patterns("*.so"))
    code = f"""
from tfdml.cli.checks.codecs import check_codecs
print(check_codecs())
from tfdml.native import library
target = library.path()
# Not what this test's own process has loaded.
target.relative_to({str(tmp_path)!r})
target.write_bytes(b"of another machine")
print(check_codecs())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    missing, broken = done.stdout.splitlines()
    assert "not compiled" in missing
    assert "Compile them: tfdml build-codecs'" in missing
    assert "do not load" in broken
    assert "--rebuild" in broken


def test_command_prints_the_path_of_the_operations():
    done = subprocess.run(
        [sys.executable, "-m", "tfdml.cli.main", "build-codecs"],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert f"compiled before: {library.path()}" in done.stdout, done.stderr
