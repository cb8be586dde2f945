"""Checks which directories of reports are removed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tfdml.runtime.hang_report import job_files
from tfdml.runtime.hang_report.stacks import StackFile

USING = """
import sys, time
from pathlib import Path
from tfdml.runtime.hang_report.stacks import StackFile
file = StackFile(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""
HOURS = 2 * 3600.0


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The directory for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TFDML_JOB_DIRECTORY", raising=False)
    return tmp_path


def killed_job(directory: Path, age: float, also: str = "") -> Path:
    """Makes the directory of a job whose process was killed, some seconds ago.

    Args:
        directory: The directory.
        age: The seconds.
        also: Name of another file in it.
    """
    directory.mkdir()
    process = using(directory)
    process.kill()
    process.wait()
    if also:
        (directory / also).touch()
    make_old(directory, age)
    return directory


def make_old(directory: Path, age: float) -> None:
    os.utime(directory, (time.time() - age, time.time() - age))


def using(directory: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", USING, str(directory / "rank0.stacks")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_directory_is_made_by_those_who_join_it(temporary):
    """A job whose ranks do not find each other leaves nothing."""
    directory = job_files.new_job_directory()
    assert directory.parent == temporary
    assert not directory.exists()
    assert job_files.join_job_directory(str(directory)) == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert job_files.join_job_directory(str(directory)) == directory


def test_directories_of_killed_jobs_are_removed_by_a_later_job(temporary):
    old = killed_job(temporary / "tfdml-job-old", HOURS)
    new = killed_job(temporary / "tfdml-job-new", 60.0)
    reported = killed_job(temporary / "tfdml-job-reported", HOURS, "report-2026-11-29T00-00-00.000")
    running = temporary / "tfdml-job-running"
    running.mkdir()
    process = using(running)
    make_old(running, HOURS)
    try:
        own = job_files.join_job_directory(str(job_files.new_job_directory()))
    finally:
        process.kill()
        process.wait()
    assert set(temporary.iterdir()) == {new, reported, running, own}
    assert not old.exists()


def test_a_file_of_this_process_is_in_use_until_it_is_removed(tmp_path):
    path = tmp_path / "rank0.stacks"
    file = StackFile(path)
    try:
        assert job_files.is_in_use(path)
    finally:
        file.remove()
    assert not path.exists()
