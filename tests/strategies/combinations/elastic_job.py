"""Starts the elastic program of the combinations, and returns its outcome."""

import pickle
import sys
from pathlib import Path

from tfdml.horovod_build import child
from tfdml.topology import child_environment

# As in `elastic_program`, which is a script and trains when imported.
PROGRAM = Path(__file__).with_name("elastic_program.py")
JOINS_AT, LOST = 3, "lost"
SECONDS = 300.0  # Two starts of TensorFlow on a loaded machine, and two rendezvous.


def elastic(directory: Path, records: str, *features: str) -> dict:
    """Trains on one rank, which a second one joins.

    Args:
        directory: Directory of this job only.
        records: Directory of the mixture of data sets.
        *features: Features passed to the program.
    """
    hosts, script = directory / "hosts", directory / "hosts.sh"
    hosts.write_text("localhost:1\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    command = [
        sys.executable, str(Path(sys.executable).with_name("horovodrun")),
        "-np", "1", "--min-np", "1", "--max-np", "2", "--network-interface", "lo",
        "--gloo-timeout-seconds", "90", "--host-discovery-script", str(script),
        sys.executable, str(PROGRAM), str(directory), str(hosts), records, *features,
    ]  # fmt: skip
    environment = child_environment(
        PYTHONPATH=str(PROGRAM.parents[3]), TF_NUM_INTRAOP_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2"
    )
    ended = child.run(command, environment=environment, timeout=SECONDS)
    assert ended.ok, ended.output[-6000:]
    return pickle.loads((directory / "result").read_bytes())
