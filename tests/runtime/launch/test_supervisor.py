"""Checks that the supervisor leaves no process of its command behind, whichever ends first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdml.runtime.launch.processes import alive, end_processes

SUPERVISOR = [sys.executable, "-m", "tfdml.runtime.launch.supervisor"]
# A command with a child and an orphaned grandchild, all of which ignore SIGTERM.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, b"%d " % os.getpid())
        time.sleep(300)
    os._exit(0)
os.wait()
grandchild = int(os.read(read, 20))
child = os.fork()
if child == 0:
    time.sleep(300)
print(os.getpid(), child, grandchild, flush=True)
time.sleep(300)
"""


@pytest.fixture
def family(request):
    """Returns the supervisor, and the pids of the command's processes."""
    supervisor = subprocess.Popen(
        [*SUPERVISOR, *getattr(request, "param", []), sys.executable, "-c", FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in supervisor.stdout.readline().split()]
    assert len(alive(pids)) == 3
    yield supervisor, pids
    end_processes([supervisor.pid, *pids], 1.0)
    supervisor.wait()


def gone(pids: list[int], seconds: float = 12.0) -> bool:
    """Waits until none of the processes is left."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def test_command_ends_when_the_launcher_closes_its_pipe(family):
    supervisor, pids = family
    supervisor.stdin.close()
    assert gone(pids)
    assert supervisor.wait(5) == 128 + signal.SIGTERM


@pytest.mark.parametrize("family", [["--watch-output"]], indirect=True)
def test_command_ends_when_nobody_reads_its_output(family):
    supervisor, pids = family
    supervisor.stdin.close()
    time.sleep(0.5)
    assert len(alive(pids)) == 3, "It is the output that counts here."
    supervisor.stdout.close()
    assert gone(pids)
    assert supervisor.wait(5) == 128 + signal.SIGTERM


def test_command_ends_on_sigterm(family):
    supervisor, pids = family
    supervisor.terminate()
    assert gone(pids)


def test_descendants_end_when_the_command_is_killed(family):
    supervisor, pids = family
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids)
    assert supervisor.wait(5) == 128 + signal.SIGKILL


def test_command_ends_when_the_supervisor_is_killed(family):
    supervisor, pids = family
    supervisor.kill()
    assert gone(pids[:1])


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_is_that_of_the_command(code):
    supervisor = subprocess.Popen(
        [*SUPERVISOR, sys.executable, "-c", f"raise SystemExit({code})"], stdin=subprocess.PIPE
    )
    assert supervisor.wait(30) == code
    supervisor.stdin.close()


def test_free_ports():
    done = subprocess.run(
        [*SUPERVISOR, "--free-ports", "3"], capture_output=True, text=True, timeout=30
    )
    ports = [int(port) for port in done.stdout.split()]
    assert len(set(ports)) == 3
    # A connection could use a port that the system assigns.
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < port < given for port in ports)
