"""Checks the network lab's latency, losses and outages; the slow tests calibrate them."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tools.test_netlab import NETLAB, lab, needs_root

PROGRAM = Path(__file__).with_name("netlab_program.py")
SUMMARY = re.compile(
    r"netlab: relay (?P<cpu>[\d.]+) s of CPU for [\d.]+ MB, congestion control (?P<control>\w+), "
    r"(?P<full>\d+) packets dropped by full queues, (?P<lost>\d+) lost, (?P<cut>\d+) in outages"
)
ADD_NETEM = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem"]
needs_netem = pytest.mark.skipif(
    subprocess.run(ADD_NETEM, capture_output=True, check=False).returncode != 0,
    reason="needs the kernel's netem",
)
# Latencies and losses may be the relay's or the kernel's.
WAYS = [pytest.param(["--relay"], id="relay"), pytest.param([], marks=needs_netem, id="netem")]
pytestmark = needs_root


def seen(options: list[str], program: str, *arguments: object) -> tuple:
    """Runs a program on two hosts; returns what it has printed, and the tool's last line."""
    command = [sys.executable, str(PROGRAM), program, *map(json.dumps, arguments)]
    done = lab(*options, "--", *command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), SUMMARY.search(done.stderr)


# -- Latency and rate ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_what_leaves_a_host_is_late(way):
    """Nothing can make it earlier, whatever the machine's load."""
    trips, _ = seen([*way, "--latency", "5ms"], "round_trips", "host0", 10)
    assert len(trips) == 10
    assert min(trips) >= 0.01


def test_the_lab_itself_is_as_far_as_a_host():
    trips, _ = seen(["--relay", "--latency", "5ms"], "round_trips", "10.77.0.254", 5)
    assert min(trips) >= 0.01


def test_messages_of_an_idle_link_take_their_time():
    """A burst is 128 KB: without the relay it would arrive at once."""
    seconds, _ = seen(["--relay", "--rate", "100mbit"], "message", 100_000)
    assert seconds > 8 * 100_000 / 100e6


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("latency", "expected"), [("5ms", 0.01), ("50ms", 0.1)])
def test_round_trips_are_within_5_percent_of_twice_the_latency(way, latency, expected):
    tries = [seen([*way, "--latency", latency], "round_trips", "host0", 30)[0] for _ in range(3)]
    medians = [sorted(trips)[len(trips) // 2] for trips in tries]
    assert expected <= min(medians) < 1.05 * expected, medians


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rate", "expected"), [("100mbit", 1e8), ("1gbit", 1e9)])
@pytest.mark.parametrize("latency", ["0ms", "5ms", "50ms"])
def test_a_connection_is_within_5_percent_of_the_rate(way, rate, expected, latency):
    network = [*way, "--rate", rate, "--latency", latency]
    tries = [seen(network, "stream", 3, 3)[0] for _ in range(3)]
    assert 0.95 * expected < max(tries) < expected, tries


# -- Losses and queues -----------------------------------------------------------------------------


def test_so_many_packets_are_lost_and_the_others_keep_their_order(tmp_path):
    count = 20_000

    def arrived(seed: int, name: str) -> tuple:
        network = ["--relay", "--loss", "1%", "--seed", str(seed)]
        return seen(network, "flood", count, 100, str(tmp_path / name))

    numbers, closing = arrived(1, "first")
    assert numbers == sorted(set(numbers))
    assert 0.008 < 1 - len(numbers) / count < 0.012
    # Those of the connection at the end are counted too.
    assert 0 <= int(closing["lost"]) - (count - len(numbers)) < 5
    assert int(closing["full"]) == 0
    assert arrived(1, "again")[0] == numbers
    assert arrived(2, "other")[0] != numbers


@needs_netem
def test_netem_loses_packets(tmp_path):
    numbers, _ = seen(["--loss", "10%"], "flood", 2000, 100, str(tmp_path / "ready"))
    assert 0.05 < 1 - len(numbers) / 2000 < 0.15


def test_bytes_of_a_lossy_connection_arrive_as_they_are():
    """Super-packets are taken apart around what is lost, and what is left of them is valid."""
    again, closing = seen(["--relay", "--loss", "1%"], "copy", 40, 300_000)
    assert int(closing["lost"]) > 40
    # Answers are among the lost, and a few are sent twice; parts that are not valid, more often.
    assert 0.5 < again / int(closing["lost"]) < 2


def test_full_queues_drop_packets(tmp_path):
    """128 KB pass at once, and 50 ms of the rate find room."""
    ready = str(tmp_path / "ready")
    numbers, closing = seen(["--relay", "--rate", "20mbit"], "flood", 1000, 1400, ready)
    assert 180 < len(numbers) < 900
    assert int(closing["full"]) == 1000 - len(numbers)


# -- Outages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "host"), [([], "host0"), (["--relay"], "host0"), (["--relay"], "host1")]
)
def test_nothing_passes_in_an_outage_and_all_afterwards(way, host):
    numbers, closing = seen([*way, "--outage", f"{host}:1s:500ms"], "ticks")
    assert numbers == sorted(set(numbers))
    missing = [later - number - 1 for number, later in zip(numbers, numbers[1:], strict=False)]
    assert len([count for count in missing if count]) == 1
    assert not way or int(closing["cut"]) >= max(missing)


def test_an_outage_may_last_for_good():
    trips, _ = seen(["--relay", "--outage", "host0:0s"], "round_trips", "host0", 1)
    assert trips == [None]


@pytest.mark.parametrize("begun", [False, True])
def test_outages_may_wait_for_a_file(begun, tmp_path):
    file = tmp_path / "begun"
    if begun:
        file.touch()
    cut = ["--outage", "host0:0s", "--outages-after", str(file)]
    trips, _ = seen(["--relay", *cut], "round_trips", "host0", 1)
    assert (trips == [None]) == begun


# -- The tool --------------------------------------------------------------------------------------


def test_connections_have_the_congestion_control():
    name, closing = seen(["--relay", "--congestion", "reno"], "congestion_control")
    assert name == closing["control"] == "reno"


def test_the_end_of_the_relay_ends_the_job(tmp_path):
    begun = 'touch "$0/$NETLAB_HOST"; exec sleep 1000'
    command = [str(NETLAB), "--relay", "--", "sh", "-c", begun, str(tmp_path)]
    tool = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        family = psutil.Process(tool.pid).children(recursive=True)
        next(process for process in family if "netlab_relay" in process.name()).kill()
        _, errors = tool.communicate(timeout=30)
    finally:
        tool.kill()
    assert tool.returncode == 2
    assert "The relay must not end. Received: exit code -9." in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latency", "5"], "`--latency` must be a time such as 5ms. Received: '5'."),
        (["--loss", "0.1"], "`--loss` must be a percentage such as 0.1%. Received: '0.1'."),
        (["--relay", "--rate", "1"], "`--rate` must be bits per second such as 100mbit"),
        (["--outage", "host2:1s"], "`--outage` must be one of the 2 hosts"),
        (["--outage", "host1"], "`--outage` must be one of the 2 hosts"),
        (["--outage", "host1:soon"], "`--outage` must be one of the 2 hosts"),
        (["--congestion", "none"], "Unknown tcp congestion algorithm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_refused(options, message):
    done = lab(*options, "--", "true")
    assert done.returncode == 2
    assert message in done.stderr


def test_help_says_how_the_network_is_made():
    page = " ".join(lab("--help").stdout.split())
    assert "tools/netlab --rate 1gbit --latency 5ms --loss 0.1% --congestion cubic" in page
    for part in ("Queues:", "the relay's 256 MB", "netem", "connections wait", "--outage"):
        assert part in page


def test_a_compiler_is_needed_at_first(tmp_path):
    for tool in ("bridge", "ip", "mount", "tc", "unshare"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    only = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, f"{NETLAB}.py", "--relay", "--", "true"]
    done = subprocess.run(command, env=only, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "The relay must be compiled at its first use, which needs g++" in done.stderr


ALL_REDUCE = """
import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
total = hvd.allreduce(tf.fill([100_000], hvd.rank() + 1.0), op=hvd.Sum)
if hvd.rank() == 0:
    print("TOTAL", hvd.size(), sorted(set(total.numpy().tolist())))
"""


@pytest.mark.slow
def test_horovod_reduces_over_a_far_network():
    network = ["--relay", "--latency", "5ms", "--loss", "0.1%", "--rate", "1gbit"]
    done = lab(*network, "--job", "horovod", "--", sys.executable, "-c", ALL_REDUCE)
    assert done.returncode == 0, done.stderr
    assert "TOTAL 2 [3.0]" in done.stdout
    assert float(SUMMARY.search(done.stderr)["cpu"]) >= 0
