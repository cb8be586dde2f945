"""Checks between which ranks small exchanges travel, by the kernel's counts of a network lab."""

import json
import subprocess
import sys
from pathlib import Path

from tests.tools.test_netlab import NETLAB, needs_root
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("connections_program.py")


@needs_root
def test_one_connection_between_two_hosts_carries_small_sums():
    """Ranks that agree on what is ready exchange such sums, many in each step."""
    command = [sys.executable, f"{NETLAB}.py", "--hosts", "2", "--ranks", "2", "--job", "horovod"]
    done = subprocess.run(
        [*command, "--", sys.executable, str(PROGRAM)],
        env=child_environment(PYTHONPATH=str(PROGRAM.parents[2])),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    connections = json.loads(done.stdout.splitlines()[-1])
    # Each of two ranks is connected to each of two others.
    assert connections["all"] >= 4
    assert connections["used"] == 1
