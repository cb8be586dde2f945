"""Checks the network lab: hosts with names, an enforced rate, and no leftovers."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

NETLAB = Path(__file__).resolve().parents[2] / "tools" / "netlab"
# Sends 2 MB from host 1 to host 0, which prints the seconds and the bytes received.
TRANSFER = """
import os, socket, time
own, size = int(os.environ["NETLAB_HOST"]), 2_000_000
if own == 0:
    connection, _ = socket.create_server(("host0", 5000)).accept()
    begin, got = time.perf_counter(), 0
    while got < size:
        got += len(connection.recv(1 << 20))
    seconds = time.perf_counter() - begin
    print(seconds, open("/sys/class/net/eth0/statistics/rx_bytes").read())
else:
    for attempt in range(100):
        try:
            connection = socket.create_connection(("host0", 5000))
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(bytes(size))
    connection.recv(1)
"""


def lab(*arguments: str, before: tuple = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*before, str(NETLAB), *arguments], capture_output=True, text=True, timeout=60
    )


needs_root = pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode != 0,
    reason="needs root",
)


@needs_root
def test_hosts_have_names_and_addresses():
    shown = 'echo "$NETLAB_HOST/$NETLAB_HOSTS $(hostname) $(getent hosts $(hostname))"'
    done = lab("--hosts", "3", "--", "sh", "-c", shown)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split() for line in done.stdout.splitlines()) == [
        [f"{i}/3", f"host{i}", f"10.77.0.{i + 1}", f"host{i}"] for i in range(3)
    ]


@needs_root
@pytest.mark.parametrize(("ranks", "each"), [("2", [0, 0, 1, 1]), ("2,1", [0, 0, 1])])
def test_hosts_run_several_ranks(ranks, each):
    shown = 'echo "$NETLAB_RANK/$NETLAB_RANKS $NETLAB_HOST $(hostname)"'
    done = lab("--hosts", "2", "--ranks", ranks, "--", "sh", "-c", shown)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split() for line in done.stdout.splitlines()) == [
        [f"{rank}/{len(each)}", str(host), f"host{host}"] for rank, host in enumerate(each)
    ]


@pytest.mark.parametrize("ranks", ["0", "2,1,1", "two"])
def test_numbers_of_ranks_are_checked(ranks):
    done = lab("--hosts", "2", "--ranks", ranks, "--", "true")
    assert done.returncode == 2
    assert "`--ranks` must be a positive number, or one for each of the 2 hosts" in done.stderr


@pytest.mark.slow
@needs_root
def test_network_rate_is_enforced():
    done = lab("--rate", "20mbit", "--", sys.executable, "-c", TRANSFER)
    assert done.returncode == 0, done.stderr
    seconds, received = map(float, done.stdout.split())
    # 16 Mbit, of which the first 128 KB may arrive at once.
    assert 0.65 < seconds < 2.0
    assert 2_000_000 < received < 2_200_000


@needs_root
def test_the_first_host_that_fails_decides_the_exit_code():
    done = lab("--", "sh", "-c", "[ $NETLAB_HOST = 0 ] && exit 3; sleep 0.5")
    assert done.returncode == 3


@needs_root
def test_a_host_that_hangs_does_not_hide_another_that_fails():
    done = lab("--", "sh", "-c", "[ $NETLAB_HOST = 1 ] && exit 3; sleep 1000")
    assert done.returncode == 3


@needs_root
@pytest.mark.parametrize(
    ("end", "network"),
    [(signal.SIGTERM, ()), (signal.SIGKILL, ()), (signal.SIGKILL, ("--relay",))],
)
def test_nothing_is_left_behind(end, network, tmp_path):
    marker = str(tmp_path)
    begun = 'touch "$0/$NETLAB_HOST"; exec sleep 1000'
    tool = subprocess.Popen([str(NETLAB), *network, "--", "sh", "-c", begun, marker])
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        family = psutil.Process(tool.pid).children(recursive=True)
        assert len(family) >= 3
        relays = [process for process in family if "netlab_relay" in process.name()]
        assert len(relays) == len(network)
    finally:
        tool.send_signal(end)
    assert tool.wait(10) != 0
    gone, left = psutil.wait_procs(family, timeout=10)
    assert not left
    assert "host0" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


@needs_root
def test_wrong_options_are_refused():
    done = lab("--rate", "fast", "--", "true")
    assert done.returncode == 2
    assert 'illegal value for "rate"' in done.stderr


@pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "true"], check=False).returncode != 0,
    reason="needs a user without rights",
)
def test_it_is_refused_without_privileges():
    done = lab("--", "true", before=("unshare", "--user"))
    assert done.returncode == 2
    assert "must run as root and be allowed to make namespaces" in done.stderr
    assert "Run it by sudo" in done.stderr
