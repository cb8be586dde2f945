"""Checks stacks that real processes are asked for, whatever their main thread does."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import pytest

from tests.harness.command import ROOT
from tfdml.runtime.hang_report import job_files
from tfdml.runtime.hang_report.stacks import (
    SIGNAL,
    StackFile,
    StackFrame,
    describe_library,
    describe_place,
    main_frames,
    main_thread_of,
    read_from,
)

PROGRAM = """
import ctypes, signal, sys, threading, time
from pathlib import Path
from tfdml.runtime.hang_report.stacks import SIGNAL, StackFile
if "handler" in sys.argv:
    signal.signal(SIGNAL, lambda *_: print("own", flush=True))
file = StackFile(Path(sys.argv[1]))

def other():
    while True:
        time.sleep(0.1)
        if "answers" in sys.argv:
            file.was_asked()

threading.Thread(target=other, daemon=True).start()
print("ready", flush=True)

def sleep():
    time.sleep(600)

def loop():
    while True:
        pass

def lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def gil():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def without_handler():
    signal.signal(SIGNAL, signal.SIG_DFL)
    print("without", flush=True)
    time.sleep(600)

globals()[sys.argv[2]]()
"""


@pytest.fixture
def started(tmp_path):
    """Returns a function that starts the program, and has it ended after the test."""
    processes = []

    def start(*arguments: str) -> subprocess.Popen:
        path = tmp_path / "program.py"
        path.write_text(PROGRAM)
        process = subprocess.Popen(
            [sys.executable, str(path), str(tmp_path / "rank3.stacks"), *arguments],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def stacks_after(path, seconds: float = 5.0) -> str:
    """Returns a file's stacks once they are written."""
    deadline = time.monotonic() + seconds
    while "Thread" not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    return path.read_text()


@pytest.mark.parametrize(("what", "line"), [("sleep", 19), ("lock", 28), ("gil", 33)])
def test_stacks_are_written_whatever_the_main_thread_does(started, tmp_path, what, line):
    process = started(what)
    path = tmp_path / "rank3.stacks"
    assert job_files.open_stacks(process.pid) == (3, path)
    assert job_files.processes_of(tmp_path) == {3: process.pid}
    stacks, python_runs = job_files.ask(process.pid)
    assert not python_runs  # No thread answers.
    assert len(stacks.split("(most recent call first)")) == 3  # Two threads.
    frames = main_frames(stacks, main_thread_of(path))
    assert describe_place(frames) == f"in {what} at program.py:{line}"
    assert process.poll() is None


@pytest.mark.parametrize("what", ["sleep", "loop"])
def test_a_process_whose_python_runs_is_never_signalled(started, what):
    """The handler in C could end it: it reads frames that change meanwhile."""
    process = started(what, "answers", "handler")
    stacks, python_runs = job_files.ask(process.pid)
    assert python_runs
    assert f"in {what}" in stacks
    process.kill()
    assert process.stdout.read() == ""  # Its own handler of the signal has printed nothing.


def test_a_stopped_process_writes_when_it_goes_on(started, tmp_path):
    process = started("sleep", "answers", "handler")
    process.send_signal(signal.SIGSTOP)
    while not job_files.is_stopped(process.pid):
        time.sleep(0.01)
    assert job_files.ask(process.pid) == ("", False)
    assert "Thread" not in stacks_after(tmp_path / "rank3.stacks", 0.5)
    process.send_signal(signal.SIGCONT)
    assert "in sleep" in stacks_after(tmp_path / "rank3.stacks")
    process.kill()
    assert process.stdout.read() == ""  # Not signalled: its Python runs again.


def test_a_programs_own_handler_is_called_too(started, tmp_path):
    process = started("sleep", "handler")
    process.send_signal(SIGNAL)
    assert "in sleep" in stacks_after(tmp_path / "rank3.stacks")
    assert process.stdout.readline() == "own\n"


def test_a_process_without_the_file_is_never_signalled(tmp_path):
    """The signal would end it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        job_files.ask(process.pid)
        time.sleep(0.2)
        assert process.poll() is None
        process.kill()
    assert job_files.open_stacks(process.pid) is None
    assert job_files.processes_of(tmp_path) == {}


def test_a_process_that_has_given_the_handler_up_is_never_signalled(started):
    process = started("without_handler")
    assert process.stdout.readline() == "without\n"
    job_files.ask(process.pid)
    time.sleep(0.2)
    assert process.poll() is None


def write_own_stacks(path: str) -> None:
    """Writes this process's stacks with and without a signal."""
    file = StackFile(Path(path))
    try:
        assert not file.was_asked()
        stacks = file.dump()
        frames = main_frames(stacks, main_thread_of(file.path))
        assert describe_place(frames).startswith("in write_own_stacks at ")
        assert not file.was_asked()
        os.kill(os.getpid(), SIGNAL)
        assert file.was_asked()
        assert not file.was_asked()
        assert read_from(file.path, 0).count("(most recent call first)") >= 2
    finally:
        file.remove()
    assert not file.path.exists()
    assert file.dump() == ""
    assert not file.was_asked()


def test_own_stacks_are_no_request(tmp_path):
    # In a process of its own: of more than 100 threads, the handler in C leaves out the first.
    call = f"test_stacks.write_own_stacks({str(tmp_path / 'rank0.stacks')!r})"
    program = f"from tests.runtime.hang_report import test_stacks; {call}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_the_function_of_a_library_is_named():
    own = StackFrame("/home/me/train.py", 33, "<module>")
    # Not that of `fit`'s code: TensorFlow may have converted it to a temporary file.
    in_fit = StackFrame(inspect.getfile(keras.Model), 117, "fit")
    in_module = StackFrame(threading.__file__, 331, "wait")
    here = StackFrame(job_files.__file__, 5, "ask")
    assert describe_library([in_fit, own]).startswith("fit at keras/src/")
    assert describe_library([in_fit, own]).endswith(".py:117")
    assert describe_library([in_module, in_fit, own]) == "wait at threading.py:331"
    assert describe_library([here, own]) == "ask at tfdml/runtime/hang_report/job_files.py:5"
    assert describe_library([own, in_fit]) == describe_library([]) == ""
