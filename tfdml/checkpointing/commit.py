"""Writing of one checkpoint, so that it exists as a whole or not at all.

Every rank writes one member into a directory with a temporary name. Rank 0 waits for all of them,
writes the manifest with their checksums, makes files and names durable, and renames the directory
once. So the ranks need no collectives, which a thread beside training could not use.

A store of objects has no such rename, but an object appears in it at once. There members are
written to their final directory, and the manifest comes last: a directory without one is not a
checkpoint yet.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.checkpointing import manifest as manifests
from tfdml.checkpointing.files import Files, remove_tree, write_file
from tfdml.checkpointing.manifest import CheckpointManifest, RankFile
from tfdml.checkpointing.tensors import write_tensors

PARTIAL = "partial-"
_NOTE, _FAILED = ".written.json", ".failed"


def member_name(rank: int, world_size: int) -> str:
    """Returns the file name of a rank's member."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def save(
    files: Files,
    directory: str,
    job: str,
    rank: int,
    manifest: CheckpointManifest,
    tensors: Mapping[str, np.ndarray],
    notes: Any,
    *,
    wait: float = 600.0,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Writes a rank's part of a checkpoint; on rank 0 returns once all of it is durable.

    Args:
        files: File system to write to.
        directory: Directory of all checkpoints.
        job: Identifier of this save, the same on all ranks and different from all other saves.
        rank: Rank of this process.
        manifest: Manifest of the checkpoint; its members are added.
        tensors: This rank's part of the state.
        notes: JSON-serialisable data of this rank's part.
        wait: Seconds that rank 0 waits for another rank's part.
        given_up: Function that returns whether rank 0 should stop waiting: other ranks are lost.

    Raises:
        OSError: If it cannot be written. The part that was written is removed: a full disk needs
            the space.
    """
    staging = staging_directory(files, directory, manifest, job)
    try:
        own = write_member(files, staging, rank, manifest.world_size, tensors, notes)
        if rank == 0:
            members = [
                own,
                *_members_of_others(files, staging, manifest.world_size, wait, given_up),
            ]
            commit(files, directory, staging, manifest, members)
    except OSError:
        if rank:
            # An empty file needs no space on most disks. Without it rank 0 waits for a while.
            failed = os.path.join(staging, member_name(rank, manifest.world_size)) + _FAILED
            with contextlib.suppress(OSError):
                write_file(files, failed, b"")
        else:
            with contextlib.suppress(OSError):
                final = os.path.join(directory, manifest.directory)
                remove_checkpoint(files, staging if files.renames_whole else final)
        raise


def staging_directory(files: Files, directory: str, manifest: CheckpointManifest, job: str) -> str:
    """Returns the directory to which the members of a checkpoint are written."""
    if files.renames_whole:
        return os.path.join(directory, f"{PARTIAL}{manifest.directory}-{job}")
    # One directory for each save: a writer of a dead job may still be busy.
    return os.path.join(directory, manifest.directory, job)


def write_member(
    files: Files,
    staging: str,
    rank: int,
    world_size: int,
    tensors: Mapping[str, np.ndarray],
    notes: Any,
) -> RankFile:
    """Writes a rank's member.

    Args:
        files: File system to write to.
        staging: Directory of the members; created if missing.
        rank: Rank of this process.
        world_size: Number of ranks.
        tensors: This rank's part of the state.
        notes: JSON-serialisable data of this rank's part.

    Returns:
        The member. Ranks other than 0 also write it to a note beside the file, for rank 0.
    """
    files.make_directory(staging)
    name = member_name(rank, world_size)
    path = os.path.join(staging, name)
    member = RankFile(name, *write_tensors(files, path, tensors, notes))
    if rank:
        # Under its final name the note is whole: rank 0 may look at any time.
        note = json.dumps(dataclasses.asdict(member)).encode()
        write_file(files, path + ".part", note)
        files.rename(path + ".part", path + _NOTE)
    return member


def _members_of_others(
    files: Files, staging: str, world_size: int, wait: float, given_up: Callable[[], bool]
) -> Iterator[RankFile]:
    for rank in range(1, world_size):
        path = os.path.join(staging, member_name(rank, world_size))
        note = path + _NOTE
        _await(files, path, wait, given_up, f"rank {rank}")
        yield RankFile(**json.loads(files.read(note)))
        files.unlink(note)


def commit(
    files: Files,
    directory: str,
    staging: str,
    manifest: CheckpointManifest,
    members: Sequence[RankFile],
) -> None:
    """Makes a checkpoint of the members that all ranks have written; only rank 0 calls it.

    Args:
        files: File system to write to.
        directory: Directory of all checkpoints.
        staging: Directory of the members.
        manifest: Manifest of the checkpoint; its members are added.
        members: Members of all ranks.
    """
    final = os.path.join(directory, manifest.directory)
    if not files.renames_whole:
        inside = os.path.relpath(staging, final)
        members = [dataclasses.replace(m, name=f"{inside}/{m.name}") for m in members]
        manifests.write_manifest(
            files, final, dataclasses.replace(manifest, members=tuple(members))
        )
        return
    manifests.write_manifest(files, staging, dataclasses.replace(manifest, members=tuple(members)))
    files.sync_directory(staging)
    files.rename(staging, final)
    files.sync_directory(directory)


def is_committed(files: Files, path: str) -> bool:
    """Returns whether a directory with a checkpoint's name holds a checkpoint, whole or damaged."""
    return files.renames_whole or files.exists(os.path.join(path, manifests.NAME))


def remove_checkpoint(files: Files, path: str) -> None:
    """Removes a checkpoint or a part of one, so that a remaining half is not taken for one."""
    if files.renames_whole:
        head, name = os.path.split(path)
        if not name.startswith(PARTIAL):
            gone = os.path.join(head, f"{PARTIAL}gone-{name}")
            files.rename(path, gone)
            path = gone
    elif files.exists(os.path.join(path, manifests.NAME)):
        files.unlink(os.path.join(path, manifests.NAME))
    remove_tree(files, path)


def _await(files: Files, path: str, seconds: float, given_up: Callable[[], bool], who: str) -> None:
    """Waits until a rank has written the note on its member."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not files.exists(path + _NOTE):
        if files.exists(path + _FAILED):
            raise OSError(f"{who} could not write its part; see its error message.")
        if given_up():
            raise OSError(f"{who} is no longer waited for.")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{who} must write its part of a checkpoint within {seconds:.0f} s. Received: "
                f"no {path}. All ranks must see the same directory; see that rank's "
                f"output."
            )
        time.sleep(pause)
        pause = min(2 * pause, files.look_every)
