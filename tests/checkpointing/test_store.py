"""Checks checkpoints in an object store, where only single objects appear whole."""

import errno
import os
import secrets
import threading

import pytest

from tests.checkpointing.faulty_files import Crash
from tests.checkpointing.stores import CrashingStore, FailingStore
from tests.checkpointing.test_commit import RANKS, check_found, tensors
from tfdml import checkpointing
from tfdml.checkpointing import CheckpointDirectory, CheckpointManifest, Files, open_files
from tfdml.checkpointing.claim import DirectoryInUse, Lease
from tfdml.checkpointing.files import write_file


@pytest.fixture(params=["memory", "bucket"])
def url(request, tmp_path) -> str:
    """Returns the URL of a run in a store."""
    name = secrets.token_hex(4) if request.param == "memory" else str(tmp_path)
    return f"{request.param}://{name}/run"


def opened(files: Files, url: str, messages: list | None = None) -> CheckpointDirectory:
    checkpoint_directory = CheckpointDirectory(
        url, files, (messages if messages is not None else []).append
    )
    checkpoint_directory._claim._seconds = 0.2
    return checkpoint_directory


def save(files: Files, url: str, step: int) -> None:
    """Saves a checkpoint as two ranks do, one after the other, and removes the previous one."""
    manifest = CheckpointManifest(0, 0, step, RANKS, (), {"step": step})
    for rank in (1, 0):
        part = tensors(step, rank)
        checkpointing.save(files, url, f"job{step}", rank, manifest, part, {"r": rank}, wait=1.0)
    opened(files, url).keep(1, fit=0)


def check(url: str, steps: tuple[int, ...], messages: list | None = None) -> int:
    """Recovers as a restart does; returns the step that was found."""
    checkpoint_directory = opened(open_files(url), url, messages)
    checkpoint_directory.claim()
    found = checkpoint_directory.newest(0)
    assert found is not None
    check_found(found, steps)
    left = [n for n in open_files(url).names(url) if not n.startswith("damaged-")]
    assert left == [*checkpoint_directory.checkpoints(), "lock"]
    for name in checkpoint_directory.checkpoints():
        checkpointing.verify(open_files(url), f"{url}/{name}")
    checkpoint_directory.release()
    return found.manifest.step


def kill_everywhere(url: str, files: type) -> set[int]:
    """Interrupts a save of step 2 at each of its changes, and restarts; returns the steps found."""
    found = set()
    for stop_at in range(60):
        run = f"{url}{stop_at}"
        save(CrashingStore(run), run, 1)
        ended = False
        try:
            save(files(run, stop_at), run, 2)
        except Crash:
            ended = True
        messages: list[str] = []
        found.add(check(run, (1, 2) if ended else (2,), messages))
        assert not messages
        save(CrashingStore(run), run, 3)
        assert check(run, (3,)) == 3
        if not ended:
            assert stop_at > 6
            return found
    raise AssertionError("the save never ended")


def test_killed_at_every_change(url):
    assert kill_everywhere(url, CrashingStore) == {1, 2}


class CommitsByRename(CrashingStore):
    renames_whole = True


class MarksFirst(CrashingStore):
    """Writes the manifest before the members."""

    def sync(self, file):
        if file[0].endswith(".safetensors"):
            final = os.path.dirname(os.path.dirname(file[0]))
            marker = self.create(f"{final}/checkpoint.json")
            super().sync(marker)
            self.close(marker)
        super().sync(file)


@pytest.mark.parametrize("mutant", [CommitsByRename, MarksFirst])
def test_the_marker_comes_last(url, mutant):
    """With a rename, or with the marker first, a kill leaves half of a checkpoint."""
    with pytest.raises((AssertionError, checkpointing.NoWholeCheckpoint)):
        kill_everywhere(url, mutant)


def test_damaged_checkpoint_is_set_aside_and_the_previous_is_used(url):
    files, messages = open_files(url), []
    for step in (1, 2):
        manifest = CheckpointManifest(0, 0, step, RANKS, (), {"step": step})
        for rank in (1, 0):
            checkpointing.save(files, url, "job", rank, manifest, tensors(step, rank), {"r": rank})
    member = f"{url}/fit-000-epoch-0000-step-0000000002/job/rank-00001-of-00002.safetensors"
    content = files.read(member)
    file = files.create(member)
    files.write(file, memoryview(content[:-1]))
    files.sync(file)
    files.close(file)
    assert check(url, (1,), messages) == 1
    assert len(messages) == 1
    assert "rank-00001-of-00002.safetensors has" in messages[0]
    aside = "damaged-fit-000-epoch-0000-step-0000000002"
    assert files.exists(f"{url}/{aside}/checkpoint.json")
    assert check(url, (1,)) == 1


@pytest.mark.parametrize(
    "error",
    [ConnectionError("reset"), TimeoutError(), OSError(errno.EIO, "x"), RuntimeError("503")],
)
def test_transient_errors_are_retried(url, error):
    files = FailingStore(url, error, times=3, patience=5.0)
    save(files, url, 1)
    assert check(url, (1,)) == 1
    assert len(files.messages) == 3
    assert "will be retried" in files.messages[0]


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ConnectionError("reset"), None),
        (RuntimeError("503"), None),
        (OSError(errno.ENOSPC, "full"), 1),
        (OSError(errno.EDQUOT, "quota"), 1),
        (PermissionError("no"), 1),
    ],
)
def test_lasting_errors_are_reported_and_keep_the_previous_checkpoint(url, error, tries):
    save(open_files(url), url, 1)
    files = FailingStore(url, error, times=10**6, patience=0.3)
    manifest = CheckpointManifest(0, 0, 2, 1, (), {})
    with pytest.raises(OSError, match=str(error.args[-1])):
        checkpointing.save(files, url, "job", 0, manifest, tensors(2, 0), {})
    assert files.tried == tries if tries else files.tried > 1
    assert check(url, (1,)) == 1


def test_store_without_its_plugin_is_refused_at_once():
    with pytest.raises(ValueError, match="`directory` must be local, or in a store whose plug-in"):
        open_files("nosuchstore://bucket/run")


def lease(url: str, messages: list, host: str | None = None, seconds: float = 0.5) -> Lease:
    new_lease = Lease(url, open_files(url), messages.append, seconds)
    new_lease._files.look_every = 0.05
    if host:
        new_lease._own["host"] = host
    return new_lease


def test_a_claim_is_read_again_while_it_is_written(url):
    own = lease(url, [], seconds=60.0)
    own.take()
    content = own._files.read(own._object)
    write_file(own._files, own._object, b"")
    writing = threading.Timer(0.3, write_file, (own._files, own._object, content))
    writing.start()
    own.check()
    writing.join()
    own.release()


def test_second_job_is_refused_while_the_first_runs(url):
    messages: list[str] = []
    # Long enough for a thread on a busy machine; no test waits that long.
    first, second = (lease(url, messages, host, seconds=5.0) for host in (None, "elsewhere"))
    first.take()
    with pytest.raises(DirectoryInUse, match=f"process {os.getpid()} on .* uses"):
        second.take()
    first.check()
    first.release()
    second.take()
    second.release()
    assert len(messages) == 1


def test_dead_job_is_replaced_and_notices_it_if_alive(url):
    messages: list[str] = []
    first, second = lease(url, messages), lease(url, messages, host="elsewhere")
    first.take()
    first._over.set()  # Stopped: it no longer renews the lease.
    second.take()
    with pytest.raises(DirectoryInUse, match="elsewhere"):
        first.check()
    second.release()


def test_dead_job_of_this_machine_is_not_waited_for(url):
    messages: list[str] = []
    first, second = lease(url, messages), lease(url, messages)
    first._own["started"] -= 1000.0  # As if another process had this pid before.
    first.take()
    first._over.set()
    second.take()
    second.release()
    assert messages == []
