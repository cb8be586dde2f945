"""A directory of checkpoints: whose it is, which is the newest whole one, which are kept."""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import filelock
import numpy as np

from tfdml.checkpointing import manifest as manifests
from tfdml.checkpointing.commit import PARTIAL
from tfdml.checkpointing.files import Files, remove_tree
from tfdml.checkpointing.manifest import DamagedCheckpoint, Manifest
from tfdml.checkpointing.tensors import read_tensors

DAMAGED = "damaged-"
_LOCK = "lock"


class DirectoryInUse(RuntimeError):
    """Another job writes into the directory."""


class NoWholeCheckpoint(RuntimeError):
    """There are checkpoints, and none of them is whole."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: Its directory.
        manifest: What it says of itself.
    """

    path: str
    manifest: Manifest

    def read(self) -> list[tuple[dict[str, np.ndarray], Any]]:
        """Returns each rank's tensors and notes.

        Raises:
            DamagedCheckpoint: If a member is not what was written.
        """
        members = (manifests.read_member(self.path, m) for m in self.manifest.members)
        return [read_tensors(data) for data in members]


class CheckpointDirectory:
    """The checkpoints of one job's runs, seen by rank 0: it alone changes names in it.

    Args:
        path: The directory; made if need be.
        files: What changes the file system.
        say: Called with sentences that a person should read.
    """

    def __init__(self, path: str, files: Files, say: Callable[[str], None]):
        self.path = path
        self._files = files
        self._say = say
        files.make_directory(path)
        self._lock = filelock.FileLock(os.path.join(path, _LOCK), thread_local=False)

    # -- Whose it is ---------------------------------------------------------------------------

    def claim(self) -> None:
        """Takes the directory for this process, and cleans what dead writers have left.

        Raises:
            DirectoryInUse: If a process that runs has it.
        """
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise DirectoryInUse(
                f"`directory` must be used by one job at a time. Received: {self.path}, which "
                f"{self._owner()} has. End that job, or choose another directory."
            ) from error
        with open(self._lock.lock_file, "w", encoding="utf-8") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
        for name in self._names():
            if name.startswith(PARTIAL):
                remove_tree(self._files, os.path.join(self.path, name))

    def release(self) -> None:
        """Gives the directory up."""
        self._lock.release()

    def _owner(self) -> str:
        with open(self._lock.lock_file, encoding="utf-8") as file:
            return file.read() or "another process"

    # -- What is in it -------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    def checkpoints(self, fit: int | None = None) -> list[str]:
        """Returns the names of what was committed, whole or not: of one `fit`, or of all."""
        numbers = {name: manifests.fit_of(name) for name in self._names()}
        return [n for n, f in numbers.items() if f is not None and fit in (None, f)]

    def newest(self, fit: int, start_anew: bool = False) -> Checkpoint | None:
        """Returns the newest whole checkpoint of a `fit`; sets damaged ones aside.

        Args:
            fit: Which call of `fit` of the program.
            start_anew: Whether to train from scratch where there are only damaged checkpoints.

        Returns:
            The checkpoint, None if there is none at all.

        Raises:
            NoWholeCheckpoint: If there are damaged ones only, and `start_anew` is not set.
        """
        damaged = [n for n in self._names() if n.startswith(f"{DAMAGED}fit-{fit:03d}-")]
        for name in reversed(self.checkpoints(fit)):
            path = os.path.join(self.path, name)
            try:
                return Checkpoint(path, manifests.verify(path))
            except DamagedCheckpoint as error:
                damaged.append(self._set_aside(name))
                self._say(f"A damaged checkpoint is set aside as {damaged[-1]}: {error}")
        if damaged and not start_anew:
            raise NoWholeCheckpoint(
                f"`directory` must have a whole checkpoint. Received: {self.path} with damaged "
                f"ones only: {', '.join(damaged)}. Restore them from a backup, pass "
                f"`allow_fresh_start=True` to train from scratch, or choose another directory."
            )
        return None

    def _set_aside(self, name: str) -> str:
        aside, number = f"{DAMAGED}{name}", 1
        while os.path.exists(os.path.join(self.path, aside)):
            number += 1
            aside = f"{DAMAGED}{name}-{number}"
        self._files.rename(os.path.join(self.path, name), os.path.join(self.path, aside))
        self._files.sync_directory(self.path)
        return aside

    # -- What is kept --------------------------------------------------------------------------

    def keep(self, max_to_keep: int, fit: int, also: Iterable[str] = ()) -> None:
        """Removes a `fit`'s older checkpoints.

        Args:
            max_to_keep: How many of the `fit` stay; 0 for all.
            fit: Which call of `fit`; of earlier ones the last checkpoint stays.
            also: Names that stay besides.
        """
        names = self.checkpoints(fit)
        earlier = {f: n for n in self.checkpoints() if (f := manifests.fit_of(n)) < fit}
        stay = {*names[-max_to_keep:], *earlier.values(), *also}
        for name in self.checkpoints() if max_to_keep else []:
            if name not in stay and manifests.fit_of(name) <= fit:
                self._remove(name)

    def clear(self) -> None:
        """Removes all checkpoints."""
        for name in self._names():
            if manifests.fit_of(name) is not None or name.startswith(DAMAGED):
                self._remove(name)

    def _remove(self, name: str) -> None:
        # Under a temporary name half of it cannot be taken for a damaged checkpoint.
        gone = os.path.join(self.path, f"{PARTIAL}gone-{name}")
        self._files.rename(os.path.join(self.path, name), gone)
        remove_tree(self._files, gone)
