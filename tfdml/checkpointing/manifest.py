"""Manifest of a checkpoint: `checkpoint.json`, whose presence makes a directory a checkpoint."""

import dataclasses
import errno
import json
import os
import re
import zlib
from collections.abc import Iterable
from typing import Any

from tfdml.checkpointing.files import Files, write_file

NAME = "checkpoint.json"
# Version 2 has files of servers; a checkpoint without them is of version 1.
VERSION = 2
# Bytes of a file that are checked at a time.
_CHUNK = 8 << 20
_DIRECTORY = re.compile(r"fit-(\d{3,})-epoch-\d{4,}-step-\d{10,}")


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written; the message names the file and the damage."""


@dataclasses.dataclass(frozen=True)
class Member:
    """One file of a checkpoint.

    Attributes:
        name: Path of the file, relative to the checkpoint's directory.
        bytes: Size of the file in bytes.
        crc32: CRC-32 of its content.
    """

    name: str
    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class CheckpointManifest:
    """Description of a checkpoint, without its tensors.

    Attributes:
        fit: Number of the call of `fit` in the program, from 0.
        epoch: Epoch that continues from here, from 0.
        step: Number of batches that this `fit` has trained on.
        world_size: Number of ranks that wrote the checkpoint.
        members: Files of the checkpoint, one for each rank.
        state: JSON-serialisable part of the state; opaque here.
        metrics: Metrics of the epoch that ended here; empty within an epoch.
        finished: Whether this `fit` had trained all its epochs.
        saved: Time of the save, in seconds since 1970.
        server_members: Files of parameter servers, with the rows of tables.
        version: Version of the format.
    """

    fit: int
    epoch: int
    step: int
    world_size: int
    members: tuple[Member, ...]
    state: dict[str, Any]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    finished: bool = False
    saved: float = 0.0
    server_members: tuple[Member, ...] = ()
    version: int = 1

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory; names sort in the order of training."""
        return f"fit-{self.fit:03d}-epoch-{self.epoch:04d}-step-{self.step:010d}"

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(member.bytes for member in self.all_members)

    @property
    def all_members(self) -> tuple[Member, ...]:
        """Files of the ranks and of servers."""
        return (*self.members, *self.server_members)

    def with_members(
        self, members: Iterable[Member], server_members: Iterable[Member]
    ) -> "CheckpointManifest":
        """Returns the manifest with its files."""
        servers = tuple(server_members)
        return dataclasses.replace(
            self,
            members=tuple(members),
            server_members=servers,
            version=VERSION if servers else 1,
        )


def fit_of(name: str) -> int | None:
    """Returns the number of the `fit` in a checkpoint directory's name; None for other names."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def write_manifest(files: Files, directory: str, manifest: CheckpointManifest) -> None:
    """Writes a manifest with its own checksum, and makes its content durable."""
    write_file(files, os.path.join(directory, NAME), _encode(dataclasses.asdict(manifest)))


def _encode(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields)
    return f'{{"crc32": {zlib.crc32(body.encode())}, "checkpoint": {body}}}\n'.encode()


def read_manifest(files: Files, directory: str) -> CheckpointManifest:
    """Reads the manifest of a checkpoint.

    Args:
        files: File system to read from.
        directory: Directory of the checkpoint.

    Raises:
        DamagedCheckpoint: If the manifest is missing or is not what was written.
        ValueError: If a later version of tfdml wrote it.
    """
    path = os.path.join(directory, NAME)
    data = _read(files, path)
    try:
        fields = json.loads(data)["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}.") from error
    if _encode(fields) != data:
        raise DamagedCheckpoint(f"{path} is damaged: its checksum differs from the recorded one.")
    if fields["version"] > VERSION:
        raise ValueError(
            f"{path} must be of version {VERSION} or less. Received: {fields['version']}. Read it "
            f"with the tfdml that wrote it, or a later one."
        )
    for name in ("members", "server_members"):
        fields[name] = tuple(Member(**member) for member in fields.get(name, ()))
    return CheckpointManifest(**fields)


def verify(files: Files, directory: str) -> CheckpointManifest:
    """Reads a checkpoint's manifest, and checks all its members against it.

    Args:
        files: File system to read from.
        directory: Directory of the checkpoint.

    Raises:
        DamagedCheckpoint: If the manifest or a member is missing or is not what was written.
    """
    manifest = read_manifest(files, directory)
    for member in manifest.all_members:
        _check_member(files, directory, member)
    return manifest


def _check_member(files: Files, directory: str, member: Member) -> None:
    """Checks a member, of which it has a part in memory at a time; see `read_member`."""
    path = os.path.join(directory, member.name)
    size = checksum = 0
    # A byte more than there should be; but never from the end on, which stores answer by an error.
    while size < member.bytes and (
        part := _read(files, path, size, min(size + _CHUNK, member.bytes + 1))
    ):
        size, checksum = size + len(part), zlib.crc32(part, checksum)
    _compare(path, member, size, checksum)


def read_member(files: Files, directory: str, member: Member) -> bytes:
    """Returns a member's content.

    Args:
        files: File system to read from.
        directory: Directory of the checkpoint.
        member: Entry of the member in the manifest.

    Raises:
        DamagedCheckpoint: If the file is missing or is not what was written.
    """
    path = os.path.join(directory, member.name)
    data = _read(files, path)
    _compare(path, member, len(data), zlib.crc32(data))
    return data


def _compare(path: str, member: Member, size: int, checksum: int) -> None:
    """Raises an error if a file's size or checksum is not the recorded one."""
    if size != member.bytes:
        raise DamagedCheckpoint(f"{path} has {size} bytes instead of {member.bytes}.")
    if checksum != member.crc32:
        raise DamagedCheckpoint(f"{path} is damaged: its checksum differs from the recorded one.")


def _read(files: Files, path: str, begin: int = 0, end: int | None = None) -> bytes:
    try:
        return files.read(path, begin, end)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing.") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpoint(f"{path} cannot be read: {error}.") from error
