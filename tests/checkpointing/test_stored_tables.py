"""Checks tables in checkpoints: rows that servers have written, read by any number of readers."""

import dataclasses
import json
import zlib

import numpy as np
import pytest

from tfdml import checkpointing
from tfdml.callbacks.checkpoint.directory_use import leave_directory, use_directory
from tfdml.checkpointing import CheckpointManifest, Files, commit, manifest
from tfdml.checkpointing.stored_tables import StoredTables

TABLE = np.arange(60, dtype="float32").reshape(20, 3)
# Rows of each server: one has two parts, and one is larger than a block of rows.
ROWS = {0: [(0, 7), (18, 20)], 1: [(7, 8)], 2: [(8, 18)]}


@pytest.fixture(params=["disk", "local", "memory"])
def saved(request, tmp_path) -> tuple[Files, str]:
    """Returns a checkpoint that a chief and three servers have saved."""
    at = tmp_path if request.param == "disk" else f"{request.param}://{tmp_path}"
    directory = f"{at}/run"
    files = checkpointing.open_files(directory)
    plan = CheckpointManifest(0, 0, 1, 1, (), {}, saved=5.0)
    staging = checkpointing.staging_directory(files, directory, plan, "job")
    members = {f"server {s}": commit.server_member_name(s, 3) for s in ROWS}
    for (server, parts), member in zip(ROWS.items(), members.values(), strict=True):
        tensors = {f"model/0/rows/{first}": TABLE[first:last] for first, last in parts}
        tensors[f"optimizer/1/rows/{server}"] = np.array([server], "int64")
        commit.write_for_rank_0(files, staging, member, tensors, {})
    chiefs = {"model/1": np.ones(2)}
    checkpointing.save(files, directory, "job", 0, plan, chiefs, {}, server_members=members)
    return files, f"{directory}/{plan.directory}"


def test_rows_are_read_across_parts_and_servers(saved):
    files, path = saved
    checkpoint = checkpointing.Checkpoint(files, path, checkpointing.verify(files, path))
    tables = checkpoint.tables()
    assert set(tables) == {"model/0", "optimizer/1"}
    assert tables["model/0"].shape == (20, 3)
    assert tables["model/0"].nbytes == TABLE.nbytes
    for first in range(20):
        for last in range(first, 21):
            np.testing.assert_array_equal(tables["model/0"][first:last], TABLE[first:last])
    np.testing.assert_array_equal(tables["optimizer/1"][:], [0, 1, 2])
    blocks = list(tables["model/0"].blocks())
    np.testing.assert_array_equal(np.concatenate([tables["model/0"][b] for b in blocks]), TABLE)
    # The description lets another process read them.
    other = StoredTables.from_json(tables.to_json(), print)
    np.testing.assert_array_equal(other["model/0"][5:12], TABLE[5:12])
    # The ranks' files have nothing of them.
    assert [list(tensors) for tensors, _ in checkpoint.read()] == [["model/1"]]


def test_a_damaged_file_of_a_server_is_found(saved):
    files, path = saved
    member = checkpointing.verify(files, path).server_members[1]
    whole = files.read(f"{path}/{member.name}")
    for damaged in (whole[:-1], whole + b"0", whole[:-1] + bytes([whole[-1] ^ 1])):
        file = files.create(f"{path}/{member.name}")
        files.write(file, memoryview(damaged))
        files.sync(file)
        files.close(file)
        with pytest.raises(checkpointing.DamagedCheckpoint, match="server-00001-of-00003"):
            checkpointing.verify(files, path)


def test_only_checkpoints_with_files_of_servers_need_this_version(tmp_path, saved):
    files, path = saved
    assert manifest.read_manifest(files, path).version == 2
    plain = CheckpointManifest(0, 0, 1, 1, (), {})
    checkpointing.save(Files(), str(tmp_path / "plain"), "j", 0, plain, {}, {})
    assert manifest.read_manifest(Files(), str(tmp_path / "plain" / plain.directory)).version == 1


def test_checkpoints_of_the_version_before_are_read(tmp_path):
    plan = CheckpointManifest(0, 0, 1, 1, (), {})
    fields = dataclasses.asdict(plan)
    del fields["server_members"]
    body = json.dumps(fields)
    text = f'{{"crc32": {zlib.crc32(body.encode())}, "checkpoint": {body}}}\n'
    (tmp_path / "checkpoint.json").write_text(text)
    assert manifest.read_manifest(Files(), str(tmp_path)) == plan


def test_a_server_that_cannot_write_is_named(tmp_path):
    plan = CheckpointManifest(0, 0, 1, 1, (), {})
    staging = checkpointing.staging_directory(Files(), str(tmp_path), plan, "job")
    wrong = {"model/0/rows/0": np.array([1j])}
    with pytest.raises(TypeError, match="model/0"):
        commit.write_for_rank_0(Files(), staging, "server.safetensors", wrong, {})
    members = {"parameter server 3": "server.safetensors"}
    with pytest.raises(OSError, match="parameter server 3 could not write its part"):
        checkpointing.save(Files(), str(tmp_path), "job", 0, plan, {}, {}, server_members=members)
    assert not list(tmp_path.glob("*fit*"))


@pytest.mark.parametrize("kind", ["disk", "local", "memory"])
def test_a_part_that_comes_after_its_save_has_failed_is_removed(tmp_path, kind):
    directory = str(tmp_path) if kind == "disk" else f"{kind}://{tmp_path}/late"
    use = use_directory(directory)
    try:
        use.choose(0, True, False)
        plan = CheckpointManifest(0, 0, 1, 1, (), {})
        members = {"parameter server 0": "server-0.safetensors"}
        with pytest.raises(OSError, match="no longer waited for"):
            checkpointing.save(
                use.files,
                directory,
                "job",
                0,
                plan,
                {},
                {},
                server_members=members,
                given_up=lambda: True,
            )
        staging = checkpointing.staging_directory(use.files, directory, plan, "job")
        commit.write_for_rank_0(use.files, staging, "server-0.safetensors", {"w": TABLE}, {})
        assert [name for name in use.files.names(directory) if "fit-" in name]
        # The job goes on.
        assert use.choose(0, True, False)["name"] is None
        assert not [name for name in use.files.names(directory) if "fit-" in name]
    finally:
        leave_directory(directory)
