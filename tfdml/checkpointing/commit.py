"""Writing of one checkpoint, so that it exists as a whole or not at all.

Every rank writes one member into a directory with a temporary name, and so does every parameter
server that has rows of large tables. Rank 0 waits for all of them,
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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdml.checkpointing import manifest as manifests
from tfdml.checkpointing.files import Files, remove_tree, write_file
from tfdml.checkpointing.manifest import CheckpointManifest, Member
from tfdml.checkpointing.tensors import write_tensors

PARTIAL = "partial-"
_NOTE, _FAILED = ".written.json", ".failed"


def member_name(rank: int, world_size: int) -> str:
    """Returns the file name of a rank's member."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def server_member_name(server: int, servers: int) -> str:
    """Returns the file name of a parameter server's member."""
    return f"server-{server:05d}-of-{servers:05d}.safetensors"


def save(
    files: Files,
    directory: str,
    job: str,
    rank: int,
    manifest: CheckpointManifest,
    tensors: Mapping[str, np.ndarray],
    notes: Any,
    *,
    server_members: Mapping[str, str] | None = None,
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
        server_members: File names of the members that parameter servers write, by the server.
        wait: Seconds that rank 0 waits for another's part.
        given_up: Function that returns whether rank 0 should stop waiting: others are lost.

    Raises:
        OSError: If it cannot be written. The part that was written is removed: a full disk needs
            the space.
    """
    staging = staging_directory(files, directory, manifest, job)
    ranks = manifest.world_size
    if rank:
        write_for_rank_0(files, staging, member_name(rank, ranks), tensors, notes)
        return
    others = {f"rank {r}": member_name(r, ranks) for r in range(1, ranks)}
    try:
        own = write_member(files, staging, member_name(0, ranks), tensors, notes)
        members, of_servers = (
            [_member_of(files, staging, *one, wait, given_up) for one in named.items()]
            for named in (others, server_members or {})
        )
        commit(files, directory, staging, manifest.with_members([own, *members], of_servers))
    except OSError:
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
    files: Files, staging: str, name: str, tensors: Mapping[str, np.ndarray], notes: Any
) -> Member:
    """Writes a member.

    Args:
        files: File system to write to.
        staging: Directory of the members; created if missing.
        name: File name of the member.
        tensors: Arrays by name.
        notes: JSON-serialisable data.
    """
    files.make_directory(staging)
    return Member(name, *write_tensors(files, os.path.join(staging, name), tensors, notes))


def write_for_rank_0(
    files: Files, staging: str, name: str, tensors: Mapping[str, np.ndarray], notes: Any
) -> None:
    """Writes a member, and a note beside it that tells rank 0 how it went; see `write_member`.

    Raises:
        OSError: If it cannot be written.
    """
    path = os.path.join(staging, name)
    try:
        member = write_member(files, staging, name, tensors, notes)
        # Under its final name the note is whole: rank 0 may look at any time.
        write_file(files, path + ".part", json.dumps(dataclasses.asdict(member)).encode())
        files.rename(path + ".part", path + _NOTE)
    except Exception:
        # An empty file needs no space on most disks. Without it rank 0 waits for a while.
        with contextlib.suppress(OSError):
            write_file(files, path + _FAILED, b"")
        raise


def _member_of(
    files: Files, staging: str, who: str, name: str, wait: float, given_up: Callable[[], bool]
) -> Member:
    """Waits for another's member, and returns it."""
    path = os.path.join(staging, name)
    _await(files, path, wait, given_up, who)
    member = Member(**json.loads(files.read(path + _NOTE)))
    files.unlink(path + _NOTE)
    return member


def commit(files: Files, directory: str, staging: str, manifest: CheckpointManifest) -> None:
    """Makes a checkpoint of the members that have been written; only rank 0 calls it.

    Args:
        files: File system to write to.
        directory: Directory of all checkpoints.
        staging: Directory of the members.
        manifest: Manifest of the checkpoint, with its members.
    """
    final = os.path.join(directory, manifest.directory)
    if not files.renames_whole:
        inside = os.path.relpath(staging, final)
        members, server_members = (
            [dataclasses.replace(m, name=f"{inside}/{m.name}") for m in found]
            for found in (manifest.members, manifest.server_members)
        )
        manifests.write_manifest(files, final, manifest.with_members(members, server_members))
        return
    manifests.write_manifest(files, staging, manifest)
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
    """Waits until another process has written the note on its member."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not files.exists(path + _NOTE):
        if files.exists(path + _FAILED):
            raise OSError(f"{who} could not write its part; see its output.")
        if given_up():
            raise OSError(f"{who} is no longer waited for.")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{who} must write its part of a checkpoint within {seconds:.0f} s. Received: "
                f"no {path}. All processes must see the same directory; see the output of "
                f"{who}."
            )
        time.sleep(pause)
        pause = min(2 * pause, files.look_every)
