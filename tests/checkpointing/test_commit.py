"""Checks that an interrupted save leaves the previous checkpoint or the new one whole."""

import errno
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpointing.faulty_files import Crash, CrashingFiles, FailingFiles
from tfdml import checkpointing
from tfdml.checkpointing import CheckpointDirectory, CheckpointManifest, Files
from tfdml.checkpointing.commit import member_name, write_for_rank_0
from tfdml.checkpointing.files import remove_tree

RANKS = 2


def tensors(step: int, rank: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng([step, rank])
    return {"w": numbers.normal(size=(3, 5)).astype("float32"), "n": np.int64(step)[None]}


def save(files: Files, directory: Path, step: int) -> None:
    """Saves a checkpoint as two ranks do, one after the other, and removes the previous one."""
    manifest = CheckpointManifest(0, 0, step, RANKS, (), {"step": step})
    for rank in (1, 0):
        part = tensors(step, rank)
        checkpointing.save(
            files, str(directory), "job", rank, manifest, part, {"r": rank}, wait=1.0
        )
    opened(files, directory).keep(1, fit=0)


def opened(files: Files, directory: Path, messages: list | None = None) -> CheckpointDirectory:
    return CheckpointDirectory(
        str(directory), files, (messages if messages is not None else []).append
    )


def check(directory: Path, steps: tuple[int, ...], messages: list | None = None) -> int:
    """Recovers as a restart does; returns the step that was found."""
    messages = [] if messages is None else messages
    checkpoint_directory = opened(Files(), directory, messages)
    checkpoint_directory.claim()
    found = checkpoint_directory.newest(0)
    assert found is not None, f"nothing left in {os.listdir(directory)}"
    check_found(found, steps)
    assert not [n for n in os.listdir(directory) if n.startswith("partial-")]
    checkpoint_directory.release()
    return found.manifest.step


def check_found(found: checkpointing.Checkpoint, steps: tuple[int, ...]) -> None:
    """Checks that a checkpoint is of one of these steps and holds the data saved then."""
    assert found.manifest.step in steps
    for rank, (arrays, notes) in enumerate(found.read()):
        assert notes == {"r": rank}
        for name, array in tensors(found.manifest.step, rank).items():
            np.testing.assert_array_equal(arrays[name], array)


@pytest.fixture
def base(tmp_path) -> Path:
    """A directory with a checkpoint of step 1."""
    directory = tmp_path / "base"
    directory.mkdir()
    save(Files(), directory, 1)
    return directory


def crash_points(tmp_path: Path, base: Path, files: type = CrashingFiles) -> list[tuple[int, bool]]:
    directory = tmp_path / "count"
    shutil.copytree(base, directory)
    counted = files(directory)
    save(counted, directory, 2)
    shutil.rmtree(directory)
    halves = [(i, True) for i, name in enumerate(counted.operations) if name == "write"]
    return [(i, False) for i in range(len(counted.operations) + 1)] + halves


def kill_everywhere(tmp_path: Path, base: Path, files: type, power: bool) -> set[int]:
    """Interrupts a save of step 2 at each operation, and restarts; returns the steps found."""
    found = set()
    for stop_at, half in crash_points(tmp_path, base, files):
        directory = tmp_path / f"{stop_at}{half}"
        shutil.copytree(base, directory)
        crashing = files(directory, stop_at, half)
        committed = (2,)
        try:
            save(crashing, directory, 2)
        except Crash:
            committed = (1, 2)
        left = crashing.survivors(tmp_path / f"{stop_at}{half}left") if power else [directory]
        for directory in left:
            messages: list[str] = []
            found.add(check(directory, committed, messages))
            assert not messages
            # Nothing obstructs the next save.
            save(Files(), directory, 3)
            assert check(directory, (3,)) == 3
            shutil.rmtree(directory)
    return found


def test_killed_at_every_operation(tmp_path, base):
    assert kill_everywhere(tmp_path, base, CrashingFiles, power=False) == {1, 2}


def test_power_lost_at_every_operation(tmp_path, base):
    assert kill_everywhere(tmp_path, base, CrashingFiles, power=True) == {1, 2}


class WithoutFileSync(CrashingFiles):
    def sync(self, file):
        self._count("sync")


class WithoutDirectorySync(CrashingFiles):
    def sync_directory(self, path):
        self._count("sync_directory")


class RenamesByParts(CrashingFiles):
    """Saves directly under the final name."""

    def rename(self, source, target):
        if not os.path.isdir(source) or "gone" in target:
            return super().rename(source, target)
        self.make_directory(target)
        for name in sorted(os.listdir(source), reverse=True):
            super().rename(os.path.join(source, name), os.path.join(target, name))
        self.remove_directory(source)


@pytest.mark.parametrize("mutant", [WithoutFileSync, WithoutDirectorySync, RenamesByParts])
def test_each_part_of_the_commit_is_needed(tmp_path, base, mutant):
    """The tests above fail without the sync of files or of names, or without the one rename."""
    with pytest.raises((AssertionError, checkpointing.NoWholeCheckpoint)):
        kill_everywhere(tmp_path, base, mutant, power=True)


def test_real_files_are_synced_to_disk(tmp_path, monkeypatch):
    """Checks that the real layer does what the model above assumes."""
    done: list[tuple[str, int]] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        done.append(("sync", os.fstat(descriptor).st_ino))

    def rename(source: str, target: str) -> None:
        real_rename(source, target)
        done.append(("rename", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save(Files(), tmp_path, 1)
    (checkpoint,) = tmp_path.glob("fit-*")
    commit = done.index(("rename", checkpoint.stat().st_ino))
    before = {inode for what, inode in done[:commit] if what == "sync"}
    assert {p.stat().st_ino for p in [checkpoint, *checkpoint.iterdir()]} <= before
    assert done[commit + 1] == ("sync", tmp_path.stat().st_ino)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("lasting", [False, True])
def test_error_in_every_operation(tmp_path, base, error, lasting):
    for fail_at in range(60):
        directory = tmp_path / str(fail_at)
        shutil.copytree(base, directory)
        failing = FailingFiles(fail_at, error, lasting)
        try:
            save(failing, directory, 2)
        except OSError:
            left = [n for n in os.listdir(directory) if n.startswith("partial-fit")]
            # Files written by rank 1 stay until the next start, those of rank 0 do not.
            assert fail_at < 10 or not left or "gone" in left[0]
            assert check(directory, (1, 2))
        else:
            assert failing.count <= fail_at
            assert fail_at > 20
            break
        save(Files(), directory, 3)
        assert check(directory, (3,)) == 3


def test_short_writes(tmp_path, base):
    class Short(Files):
        def write(self, file, data):
            return super().write(file, data[:7])

    save(Short(), base, 2)
    assert check(base, (2,)) == 2


def damages(path: Path):
    """Yields a description of each kind of damage to a file, while the file has it."""
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :]
            )
            yield f"bit {bit} of byte {position}"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        yield f"cut to {length} bytes"
    path.write_bytes(whole + b"\0")
    yield "longer"
    path.unlink()
    yield "missing"
    path.write_bytes(whole)


def undetected(directory: Path, names: str = "*") -> list[str]:
    """Returns the damages of a checkpoint's files that are not detected."""
    found = []
    for path in sorted(directory.glob(names)):
        for damage in damages(path):
            try:
                checkpointing.verify(Files(), str(directory))
                found.append(f"{path.name}: {damage}")
            except checkpointing.DamagedCheckpoint as error:
                found += [] if str(path) in str(error) else [f"{path.name} is not named: {error}"]
    return found


def test_every_flipped_bit_and_truncation_is_reported(base):
    (name,) = (n for n in os.listdir(base) if n.startswith("fit-"))
    assert len(os.listdir(base / name)) == RANKS + 1
    assert not undetected(base / name)


def test_without_checksums_damage_goes_unnoticed(base, monkeypatch):
    monkeypatch.setattr(zlib, "crc32", lambda data, value=0: 0)
    save(Files(), base, 2)
    assert undetected(base / "fit-000-epoch-0000-step-0000000002", "*.safetensors")


def test_damaged_checkpoint_is_set_aside_and_the_previous_is_used(base):
    checkpoint_directory, messages = opened(Files(), base), []
    for step in (2, 3):
        manifest = CheckpointManifest(0, 0, step, 1, (), {})
        checkpointing.save(Files(), str(base), "job", 0, manifest, tensors(step, 0), {"r": 0})
    member = base / "fit-000-epoch-0000-step-0000000003" / "rank-00000-of-00001.safetensors"
    member.write_bytes(member.read_bytes()[:-1])
    checkpoint_directory = opened(Files(), base, messages)
    checkpoint_directory.claim()
    assert checkpoint_directory.newest(0).manifest.step == 2
    assert len(messages) == 1
    assert "damaged-fit-000-epoch-0000-step-0000000003" in messages[0]
    assert str(member) in messages[0]
    assert (base / "damaged-fit-000-epoch-0000-step-0000000003").is_dir()


def test_only_damaged_checkpoints_are_refused_unless_allowed(base):
    shutil.rmtree(base / "fit-000-epoch-0000-step-0000000001")
    (base / "fit-000-epoch-0000-step-0000000001").mkdir()
    checkpoint_directory = opened(Files(), base)
    checkpoint_directory.claim()
    for _ in range(2):  # The second time, a damaged one has been set aside already.
        with pytest.raises(checkpointing.NoWholeCheckpoint, match="allow_fresh_start=True"):
            checkpoint_directory.newest(0)
    assert checkpoint_directory.newest(0, allow_fresh_start=True) is None
    assert checkpoint_directory.newest(1) is None


def test_second_job_is_refused_while_the_first_runs(base):
    first, second = opened(Files(), base), opened(Files(), base)
    first.claim()
    with pytest.raises(checkpointing.DirectoryInUse, match=f"process {os.getpid()} on"):
        second.claim()
    first.release()
    second.claim()


def test_leftovers_of_dead_writers_are_cleaned(base):
    dead = base / "partial-fit-000-epoch-0000-step-0000000009-dead"
    write_for_rank_0(Files(), str(dead), member_name(1, 2), tensors(1, 1), {})
    checkpoint_directory = opened(Files(), base)
    checkpoint_directory.claim()
    assert not dead.exists()
    assert checkpoint_directory.newest(0).manifest.step == 1


def test_retention_of_checkpoints(tmp_path):
    checkpoint_directory = opened(Files(), tmp_path)
    for fit, steps in ((0, (1, 2, 3)), (1, (1, 2, 3, 4))):
        for step in steps:
            manifest = CheckpointManifest(fit, 0, step, 1, (), {})
            checkpointing.save(Files(), str(tmp_path), "j", 0, manifest, tensors(1, 0), {})
            checkpoint_directory.keep(2, fit, also=["fit-001-epoch-0000-step-0000000001"])
    assert checkpoint_directory.checkpoints(0) == ["fit-000-epoch-0000-step-0000000003"]
    assert checkpoint_directory.checkpoints(1) == [
        f"fit-001-epoch-0000-step-{s:010d}" for s in (1, 3, 4)
    ]


def test_rank_with_a_missing_part_is_named(tmp_path):
    manifest = CheckpointManifest(0, 0, 1, 2, (), {})
    with pytest.raises(TimeoutError, match="rank 1 must write its part"):
        checkpointing.save(Files(), str(tmp_path), "j", 0, manifest, tensors(1, 0), {}, wait=0.05)
    assert os.listdir(tmp_path) == []


def test_members_are_safetensors(base):
    path = base / "fit-000-epoch-0000-step-0000000001" / "rank-00001-of-00002.safetensors"
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, tensors(1, 1)[name])


def test_removing_a_directory_tree(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    remove_tree(Files(), str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
