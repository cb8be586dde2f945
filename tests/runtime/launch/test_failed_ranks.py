"""Checks what `tfdml launch` says of a rank that failed, restarts, and leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runtime.faults.jobs import left_of
from tests.runtime.launch.launched import TFDML, launch
from tfdml.runtime.launch.launcher import run
from tfdml.runtime.launch.rank_process import HorovodRun, explain

_STOPPED = "rank 0: did not end by itself, and was stopped (exit code 143)"


FAILING = """
import json, os, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("begins", flush=True)
if rank == 1:
    print("something is wrong", file=sys.stderr, flush=True)
    {end}
time.sleep({others})
"""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        pytest.param("sys.exit(3)", 3, "exit code 3", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL (exit code 137)"),
    ],
)
def test_the_rank_that_failed_is_shown_first(tmp_path, end, code, words):
    began = time.monotonic()
    script = FAILING.format(end=end, others=120)
    done = launch("--workers", "3", script=script, tmp_path=tmp_path)
    assert done.returncode == code
    assert time.monotonic() - began < 45
    lines = done.stderr.split("tfdml launch: ")[1].splitlines()
    assert lines[0] == f"rank 1 failed: {words}. Its last lines:"
    assert "    something is wrong" in lines
    assert any(line.startswith("rank 0: did not end by itself") for line in lines)
    assert not left_of(tmp_path)


def test_an_error_ends_the_job_while_another_rank_sleeps(tmp_path):
    script = FAILING.format(
        end=f"open({str(tmp_path / 'raised')!r}, 'w'); raise OSError", others=600
    )
    done = launch("--workers", "2", script=script, tmp_path=tmp_path)
    # Without an error of its script, the others get `GRACE_SECONDS`, which are 10.
    assert time.time() - (tmp_path / "raised").stat().st_mtime < 8
    assert done.returncode == 1
    assert "[1] Traceback (most recent call last):" in done.stderr
    assert "rank 1 failed: exit code 1" in done.stderr
    assert "rank 0: did not end by itself" in done.stderr


LOST = """\
E0000 00:00:1.2 34 context.cc:873] Failed: lost
Additional GRPC error information from remote target
[2026-01-01 00:00:00. 75513: E a/operations.cc:697] [0]: lost
Exception ignored in: <function Executor.__del__ at 0x7f>
Traceback (most recent call last):
  File "executor.py", line 46, in __del__
    self.wait()
tensorflow.python.framework.errors_impl.UnavailableError: recvmsg:Connection reset by peer
Additional GRPC error information from remote target
ERROR:tensorflow:Worker /job:worker/replica:0/task:1 failed with UnavailableError()
:UNKNOWN:Error received from peer
Exception ignored in: <function Executor.__del__ at 0x7f>
tensorflow.python.framework.errors_impl.UnavailableError: recvmsg:Connection reset by peer
""".splitlines()
OWN = ["tfdml: the job ends", "Traceback (most recent call last):", "  File x", "ValueError: mine"]


def test_the_cause_comes_before_errors_of_tensorflow(tmp_path):
    script = f"import sys\nprint(*{[*LOST, *OWN]!r}, sep='\\n', file=sys.stderr)"
    shown = launch("-n", "1", script=script, tmp_path=tmp_path).stderr.splitlines()
    assert [line.removeprefix("[0] ") for line in shown] == [*OWN, *LOST]


def test_rank_ended_by_the_guard_is_not_blamed(tmp_path):
    script = FAILING.format(end="time.sleep(1); sys.exit(1)", others=0.1).replace(
        "time.sleep(0.1)", "sys.exit(70)"
    )
    done = launch("--workers", "2", script=script, tmp_path=tmp_path)
    assert done.returncode == 1
    assert "rank 1 failed: exit code 1" in done.stderr
    assert "rank 0: ended because another rank could not continue" in done.stderr


def test_the_rank_that_failed_under_horovodrun_is_shown_first(tmp_path):
    script = "import os, time; os.environ['HOROVOD_RANK'] == '1' and exit(3); time.sleep(600)"
    done = launch("--horovod", "-n", "2", script=script, tmp_path=tmp_path)
    assert done.returncode == 3
    report = done.stderr[done.stderr.index("tfdml launch:") :].splitlines()
    assert report[0] == "tfdml launch: rank 1 failed: exit code 3. Its last lines:"
    # `horovodrun` itself sometimes takes the rank that it ended for one that exited with code 0.
    assert [line for line in report if line.startswith("rank ")] in ([], [_STOPPED])
    assert "gloo_run" not in done.stderr


def test_ranks_that_horovodrun_ended_are_not_to_blame():
    lines = [f"Process {rank} exit with status code {code}." for rank, code in ((1, 3), (0, 143))]
    horovodrun = HorovodRun([sys.executable, "-c", f"print(*{lines}, sep='\\n'); exit(1)"])
    report = explain(run([horovodrun])).splitlines()
    assert report == ["tfdml launch: rank 1 failed: exit code 3. Its last lines:", _STOPPED]


@pytest.mark.parametrize("how", ["killed", "progress"])
def test_restarts(tmp_path, how):
    script = f"""
import json, os, sys
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
path = {str(tmp_path)!r} + f"/tries{{rank}}"
open(path, "a").write("x")
tries = len(open(path).read())
if tries < 3 and "killed" in sys.argv:
    os.kill(os.getpid(), 9)
if rank == 0 and tries > 1 and "progress" in sys.argv:
    print(f"tfdml: epoch 0 continues at step {{tries}}, from {{path}}", file=sys.stderr)
if tries < 3:
    raise ValueError("in the script")
"""
    options = ("-n", "2", "--max-restarts", "2")
    done = launch(*options, script=script, tmp_path=tmp_path, arguments=[how])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tries0").read_text() == "xxx"
    assert "restart 2 of 2" in done.stderr


@pytest.mark.parametrize("error", ["raise SystemExit(5)", "raise ValueError('in the script')"])
def test_an_error_at_the_start_is_restarted_once(tmp_path, error):
    done = launch("-n", "1", "--max-restarts", "5", script=error, tmp_path=tmp_path)
    assert done.returncode == (5 if "5" in error else 1)
    assert "restart 1 of 5" in done.stderr
    assert "restart 2 of 5" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "tfdml launch: rank 0 failed in the same way twice at the start: an error of the script, "
        "not restarted; its traceback is above."
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_no_process_is_left_whatever_ends_the_launcher(tmp_path, number):
    program = tmp_path / "program.py"
    # A rank with a child, both of which ignore SIGTERM.
    program.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        "os.write(1, b'begins\\n')\n"
        "time.sleep(300)\n"
    )
    launcher = subprocess.Popen(
        [*TFDML, "launch", "-n", "2", str(program)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(4):
        assert "begins" in launcher.stdout.readline()
    assert len(left_of(tmp_path)) >= 4
    launcher.send_signal(number)
    launcher.wait(30)
    deadline = time.monotonic() + 15
    while left_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_of(tmp_path)


def test_leftover_processes_are_found():
    """Checks the helper: it finds a process by its command line."""
    marker = "tfdml-left-of-test"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", marker])
    try:
        assert [p for p in left_of(Path(marker))] == [child.pid]
    finally:
        child.kill()
        child.wait()
    assert psutil.pid_exists(os.getpid())
