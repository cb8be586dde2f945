"""One checkpoint, written so that it is there as a whole or not at all.

Every rank writes one member into a directory with a temporary name. Rank 0 waits for all of them,
writes the manifest with their checksums, makes files and names durable, and gives the directory
its name by one rename. So the ranks need no exchange: a thread beside training could not make one.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.checkpointing import manifest as manifests
from tfdml.checkpointing.files import Files, remove_tree, write_file
from tfdml.checkpointing.manifest import Manifest, Member
from tfdml.checkpointing.tensors import write_tensors

PARTIAL = "partial-"
_NOTE = ".written.json"


def member_name(rank: int, world_size: int) -> str:
    """Returns the name of a rank's member."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def save(
    files: Files,
    directory: str,
    job: str,
    rank: int,
    manifest: Manifest,
    tensors: Mapping[str, np.ndarray],
    notes: Any,
    wait: float = 600.0,
) -> None:
    """Writes a rank's part of a checkpoint; on rank 0 returns once all of it is durable.

    Args:
        files: What writes.
        directory: The directory of all checkpoints.
        job: What tells this save from every other one, alike on all ranks.
        rank: The rank.
        manifest: What the checkpoint says of itself; its members are added.
        tensors: The rank's part of the state.
        notes: What JSON can hold of it.
        wait: Seconds that rank 0 waits for another rank's part.

    Raises:
        OSError: If it cannot be written. What there is of it is removed: a full disk needs it.
    """
    partial = os.path.join(directory, f"{PARTIAL}{manifest.directory}-{job}")
    try:
        own = write_member(files, partial, rank, manifest.world_size, tensors, notes)
        if rank == 0:
            commit(files, directory, partial, manifest, own, wait)
    except OSError:
        if rank == 0:
            with contextlib.suppress(OSError):
                remove_tree(files, partial)
        raise


def write_member(
    files: Files,
    partial: str,
    rank: int,
    world_size: int,
    tensors: Mapping[str, np.ndarray],
    notes: Any,
) -> Member:
    """Writes a rank's member into a checkpoint's temporary directory.

    Args:
        files: What writes.
        partial: The temporary directory; made if need be.
        rank: The rank.
        world_size: The number of ranks.
        tensors: The rank's part of the state.
        notes: What JSON can hold of it.

    Returns:
        The member, which ranks other than 0 also note beside it, for rank 0.
    """
    files.make_directory(partial)
    name = member_name(rank, world_size)
    path = os.path.join(partial, name)
    member = Member(name, *write_tensors(files, path, tensors, notes))
    if rank:
        # Under its name the note is whole: rank 0 may look at any time.
        note = json.dumps(dataclasses.asdict(member)).encode()
        write_file(files, path + ".part", note)
        files.rename(path + ".part", path + _NOTE)
    return member


def commit(
    files: Files,
    directory: str,
    partial: str,
    manifest: Manifest,
    own: Member,
    wait: float,
) -> str:
    """Makes a checkpoint of what all ranks have written; rank 0's part.

    Args:
        files: What writes.
        directory: The directory of all checkpoints.
        partial: The checkpoint's temporary directory.
        manifest: What the checkpoint says of itself; its members are added.
        own: Rank 0's member.
        wait: Seconds that other ranks are waited for.

    Returns:
        The checkpoint's directory.

    Raises:
        TimeoutError: If a rank's member does not come.
    """
    members = [own]
    for rank in range(1, manifest.world_size):
        note = os.path.join(partial, member_name(rank, manifest.world_size)) + _NOTE
        _await(lambda path=note: os.path.exists(path), wait, f"rank {rank}", partial)
        members.append(Member(**json.loads(Path(note).read_bytes())))
        files.unlink(note)
    manifest = dataclasses.replace(manifest, members=tuple(members))
    manifests.write_manifest(files, partial, manifest)
    files.sync_directory(partial)
    final = os.path.join(directory, manifest.directory)
    files.rename(partial, final)
    files.sync_directory(directory)
    return final


def _await(there: Callable[[], bool], seconds: float, who: str, partial: str) -> None:
    deadline, pause = time.monotonic() + seconds, 0.001
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{who} must write its part of a checkpoint within {seconds:.0f} s. Received: "
                f"nothing of it in {partial}. The directory must be the same one for all ranks; "
                f"see that rank's output."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
