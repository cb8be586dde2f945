"""`tfdml checkpoints`, as a process."""

import numpy as np
import pytest

from tfdml import checkpointing


@pytest.fixture
def saved(tmp_path):
    for step in (1, 2):
        manifest = checkpointing.Manifest(0, 0, step, 1, (), {"step": step})
        tensors = {"model/0": np.ones((3, 3), "float32"), "rank/random/numpy": np.zeros(4, "u4")}
        checkpointing.save(checkpointing.Files(), str(tmp_path), "job", 0, manifest, tensors, {})
    return tmp_path


def test_inspect(tfdml_command, saved):
    done = tfdml_command("checkpoints", "inspect", str(saved), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole") == 2
    assert "rank/random" in done.stdout


def test_damage_is_named(tfdml_command, saved):
    member = sorted(saved.glob("fit-*"))[-1] / "rank-00000-of-00001.safetensors"
    member.write_bytes(member.read_bytes()[:-1])
    done = tfdml_command("checkpoints", "inspect", str(saved), COLUMNS="200")
    assert done.returncode == 1
    assert f"damaged: {member} has" in done.stdout


def test_no_checkpoints(tfdml_command, tmp_path):
    done = tfdml_command("checkpoints", "inspect", str(tmp_path))
    assert done.returncode == 2
    assert "must have checkpoints" in done.stderr
