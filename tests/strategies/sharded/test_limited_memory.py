"""Checks that a job with sharding trains in memory that is too small without it."""

import re
import sys
from pathlib import Path

import pytest

from tfdml.horovod_build import child
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("limited_memory_program.py")
# MiB. The sharded job needs about 1,180 at its peak, the other one 1,850.
ROOM = 1500


def _job(room: int, *arguments: str) -> child.ChildResult:
    command = [
        sys.executable, str(Path(sys.executable).with_name("horovodrun")), "-np", "2",
        "--network-interface", "lo", sys.executable, str(PROGRAM), str(room), *arguments,
    ]  # fmt: skip
    environment = child_environment(
        PYTHONPATH=str(PROGRAM.parents[3]),
        TF_NUM_INTRAOP_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="2",
        # Memory that is freed goes back at once, so that the limit is for what is in use.
        MALLOC_MMAP_THRESHOLD_=str(1 << 20),
    )
    return child.run(command, environment=environment, timeout=400)


@pytest.mark.slow
def test_the_sharded_job_trains_where_the_other_one_dies():
    sharded = _job(ROOM, "sharded")
    assert len(re.findall("trained 288 MiB of weights", sharded.output)) == 2, sharded.output[
        -4000:
    ]
    whole = _job(ROOM)
    assert not whole.ok
    assert not whole.timed_out
    assert "trained" not in whole.output
