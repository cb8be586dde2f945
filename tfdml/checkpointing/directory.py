"""Directory of checkpoints: its owner, its newest whole checkpoint, and the ones to keep."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tfdml.checkpointing import manifest as manifests
from tfdml.checkpointing.claim import make_claim
from tfdml.checkpointing.commit import PARTIAL, is_committed, remove_checkpoint
from tfdml.checkpointing.files import Files, remove_tree
from tfdml.checkpointing.manifest import CheckpointManifest, DamagedCheckpoint
from tfdml.checkpointing.stored_tables import StoredTables
from tfdml.checkpointing.tensors import StoredTensor, read_some_tensors, read_tensors

DAMAGED = "damaged-"


class NoWholeCheckpoint(RuntimeError):
    """There are checkpoints, but all of them are damaged."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        files: File system to read from.
        path: Path of its directory.
        manifest: Manifest of the checkpoint.
    """

    files: Files
    path: str
    manifest: CheckpointManifest

    def read(self) -> list[tuple[dict[str, np.ndarray], Any]]:
        """Returns each rank's tensors and notes.

        Raises:
            DamagedCheckpoint: If a member is missing or is not what was written.
        """
        given = self.manifest.members
        members = (manifests.read_member(self.files, self.path, m) for m in given)
        return [read_tensors(data) for data in members]

    def read_all_but(
        self, is_left: Callable[[str], bool]
    ) -> list[tuple[dict[str, np.ndarray | StoredTensor], Any]]:
        """Returns each rank's tensors and notes, unlike `read` without checking them again.

        Args:
            is_left: Whether tensors of this name stay in their files until they are asked for.
        """
        paths = [os.path.join(self.path, member.name) for member in self.manifest.members]
        return [read_some_tensors(self.files, path, is_left) for path in paths]

    def tables(self) -> StoredTables:
        """Returns the tables that parameter servers have written, by name."""
        return StoredTables.of(self.files, self.path, self.manifest)


class CheckpointDirectory:
    """Checkpoints of one job's runs, seen by rank 0: only rank 0 changes names in the directory.

    Args:
        path: Path of the directory; created if missing.
        files: File system of the directory.
        say: Function called with messages for the user.
    """

    def __init__(self, path: str, files: Files, say: Callable[[str], None]):
        self.path = path
        self._files = files
        self._say = say
        files.make_directory(path)
        self._claim = make_claim(path, files, say)

    # -- Ownership -----------------------------------------------------------------------------

    def claim(self) -> None:
        """Takes the directory for this process, and removes what dead writers have left.

        Raises:
            DirectoryInUse: If a running process has it.
        """
        self._claim.take()
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Removes what failed saves and dead writers have left, while nothing is being saved."""
        for name in self._names():
            path = os.path.join(self.path, name)
            unfinished = manifests.fit_of(name) is not None and not is_committed(self._files, path)
            if name.startswith(PARTIAL) or unfinished:
                # A rank of a dead job may still be writing there; the next start removes it then.
                with contextlib.suppress(OSError):
                    remove_tree(self._files, path)

    def check_claim(self) -> None:
        """Checks that the directory still belongs to this process.

        Raises:
            DirectoryInUse: If another process has it, which took this one for dead.
        """
        self._claim.check()

    def release(self) -> None:
        """Gives the directory up."""
        self._claim.release()

    # -- Content -------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return self._files.names(self.path)

    def checkpoints(self, fit: int | None = None) -> list[str]:
        """Returns the names of committed checkpoints, whole or damaged: of one `fit`, or of all."""
        numbers = {name: manifests.fit_of(name) for name in self._names()}
        return [n for n, f in numbers.items() if f is not None and fit in (None, f)]

    def newest(self, fit: int, allow_fresh_start: bool = False) -> Checkpoint | None:
        """Returns the newest whole checkpoint of a `fit`; sets damaged ones aside.

        Args:
            fit: Number of the call of `fit` in the program.
            allow_fresh_start: Whether to train from scratch if all checkpoints are damaged.

        Returns:
            The checkpoint; None if training starts from scratch.

        Raises:
            NoWholeCheckpoint: If all checkpoints are damaged, and `allow_fresh_start` is not set.
        """
        damaged = [n for n in self._names() if n.startswith(f"{DAMAGED}fit-{fit:03d}-")]
        for name in reversed(self.checkpoints(fit)):
            path = os.path.join(self.path, name)
            try:
                return Checkpoint(self._files, path, manifests.verify(self._files, path))
            except DamagedCheckpoint as error:
                damaged.append(self._set_aside(name))
                self._say(f"A damaged checkpoint is set aside as {damaged[-1]}: {error}")
        if damaged and not allow_fresh_start:
            raise NoWholeCheckpoint(
                f"`directory` must have an undamaged checkpoint. Received: {self.path} with "
                f"damaged ones only: {', '.join(damaged)}. Restore them from a backup, pass "
                f"`allow_fresh_start=True` to train from scratch, or choose another directory."
            )
        return None

    def _set_aside(self, name: str) -> str:
        aside, number = f"{DAMAGED}{name}", 1
        while self._files.exists(os.path.join(self.path, aside)):
            number += 1
            aside = f"{DAMAGED}{name}-{number}"
        self._files.rename(os.path.join(self.path, name), os.path.join(self.path, aside))
        self._files.sync_directory(self.path)
        return aside

    # -- Retention -----------------------------------------------------------------------------

    def keep(self, max_to_keep: int, fit: int, also: Iterable[str] = ()) -> None:
        """Removes older checkpoints of a `fit` and of earlier ones.

        Args:
            max_to_keep: Number of checkpoints of the `fit` to keep; 0 removes none.
            fit: Number of the call of `fit`; of each earlier call the last checkpoint is kept.
            also: Names of other checkpoints to keep.
        """
        names = self.checkpoints(fit)
        earlier = {f: n for n in self.checkpoints() if (f := manifests.fit_of(n)) < fit}
        stay = {*names[-max_to_keep:], *earlier.values(), *also}
        for name in self.checkpoints() if max_to_keep else []:
            if name not in stay and manifests.fit_of(name) <= fit:
                remove_checkpoint(self._files, os.path.join(self.path, name))

    def clear(self) -> None:
        """Removes all checkpoints."""
        for name in self._names():
            if manifests.fit_of(name) is not None or name.startswith(DAMAGED):
                remove_checkpoint(self._files, os.path.join(self.path, name))
