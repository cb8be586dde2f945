"""A rank killed in a pipelined step ends the job with its name; the restart has the same bits."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.faults.test_faults import check
from tfdml.horovod_build import child
from tfdml.topology import child_environment


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horovod", "multi_worker"])
def test_a_rank_killed_in_a_stage_is_named(tmp_path, kind):
    check(tmp_path, kind, 2, "SIGKILL", "stage", 1)


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(tmp_path):
    ends = []
    for name, rank in (("whole", -1), ("killed", 1)):
        directory = tmp_path / name
        directory.mkdir()
        program = Path(__file__).with_name("killed_program.py")
        launch = [sys.executable, "-m", "tfdml.cli.main", "launch", "--workers", "2", "--horovod"]
        command = [*launch, "--max-restarts", "1", str(program), str(directory), str(rank), "3"]
        environment = child_environment(PYTHONPATH=str(program.parents[3]))
        ended = child.run(command, environment=environment, timeout=400)
        assert ended.returncode == 0, ended.output[-3000:]
        assert (directory / "killed").exists() == (name == "killed")
        with np.load(directory / "end.npz") as stored:
            ends.append([stored[key] for key in stored.files])
    whole, end = ends
    assert all(a.tobytes() == b.tobytes() for a, b in zip(whole, end, strict=True))
