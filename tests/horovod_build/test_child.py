"""Checks that child processes end, with all their descendants."""

import os
import sys
import time
import uuid

import psutil

from tfdml.horovod_build import child


def running(marker: str) -> list[int]:
    return [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if marker in " ".join(p.info["cmdline"] or ()) and p.status() != psutil.STATUS_ZOMBIE
    ]


def python(code: str, **options) -> child.ChildResult:
    return child.run(
        [sys.executable, "-c", code, options.pop("marker", "")],
        environment=dict(os.environ),
        timeout=options.pop("timeout", 30),
        **options,
    )


def test_output_and_exit_code():
    ended = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert ended.returncode == 3
    assert sorted(ended.output.split()) == ["err", "out"]
    assert not ended.timed_out
    assert not ended.ok
    assert python("").ok


def test_log_is_appended_to(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    ended = python("print('after')", log=log)
    assert ended.output == "after\n"
    assert log.read_text() == "before\nafter\n"


def test_time_limit_ends_children_that_ignore_sigterm():
    marker = uuid.uuid4().hex
    grandchild = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}, sys.argv[1]])\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    ended = python(code, marker=marker, timeout=2, grace=0.5)
    assert ended.timed_out
    assert not ended.ok
    assert "started" in ended.output
    assert time.monotonic() - began < 10
    assert running(marker) == []


def test_normal_end_leaves_no_grandchild():
    marker = uuid.uuid4().hex
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]])\n"
    )
    began = time.monotonic()
    assert python(code, marker=marker).ok
    assert time.monotonic() - began < 10
    assert running(marker) == []
