"""A process's state of a checkpoint directory, from one `fit` to the next."""

import contextlib
import dataclasses
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, Protocol

from tfdml.checkpointing import (
    CheckpointDirectory,
    DirectoryInUse,
    Files,
    NoWholeCheckpoint,
    open_files,
)
from tfdml.checkpointing.chaos import VARIABLE, Chaos, FaultPlan
from tfdml.topology import launched, setting


def say(sentence: str) -> None:
    """Prints a message to stderr."""
    print(f"tfdml: {sentence}", file=sys.stderr, flush=True)


class Run(Protocol):
    """One `fit` that saves checkpoints."""

    def collect(self) -> None:
        """Waits for the current write."""


@dataclasses.dataclass
class DirectoryUse:
    """One process's use of a checkpoint directory.

    Attributes:
        path: The directory.
        fits: The number of calls of `fit` that have used it and ended well, from 0 after a restart
            of the program; the index of the present one.
        job: Identifier that tells this job's files from those of dead jobs; that of rank 0 counts.
        files: Object that reads and writes files.
        saves: The number of saves begun.
        directory: Rank 0's view of the directory, once it is claimed.
        interrupted: The last `fit`, if an error has ended it.
    """

    path: str
    files: Files
    fits: int = 0
    job: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))
    saves: int = 0
    directory: CheckpointDirectory | None = None
    interrupted: Run | None = None

    @property
    def chaos(self) -> Chaos | None:
        """Fault injection of `tfdml chaos`, if it is active."""
        return self.files if isinstance(self.files, Chaos) else None

    def end_fit(self, run: Run | None, error: BaseException | None) -> None:
        """Counts a `fit` that has ended well; after an error or Ctrl-C the next one is the same.

        Args:
            run: The `fit`; None if it failed before it could save.
            error: Exception that has ended it.
        """
        if error is None:
            self.fits += 1
        else:
            self.interrupted = run

    def end_interrupted(self) -> bool:
        """Waits for the checkpoint that an interrupted `fit` may be writing.

        Returns:
            Whether there is such a `fit`, which the next one resumes.
        """
        if self.interrupted is None:
            return False
        with contextlib.suppress(OSError):
            self.interrupted.collect()
        self.interrupted = None
        return True

    def has_checkpoint(self) -> bool:
        """Returns whether the interrupted `fit` has a complete checkpoint, on rank 0."""
        if self.interrupted is not None:
            with contextlib.suppress(OSError):
                self.interrupted.collect()
        return self.directory is not None and bool(self.directory.checkpoints(self.fits))

    def choose(self, fit: int, resume: bool, allow_fresh_start: bool) -> dict[str, Any]:
        """Chooses the checkpoint from which a `fit` resumes; called on rank 0.

        Returns:
            Data for all ranks: the checkpoint's name or None, the job, and an error's text or None.
        """

        def choice() -> str | None:
            if not self._claim():
                # A server may have begun to write its part after the others had failed.
                self.directory.remove_unfinished()
            elif not resume:
                self.directory.clear()
            found = self.directory.newest(fit, allow_fresh_start)
            return found.manifest.directory if found else None

        return self._reply(choice)

    def take_over(self, fit: int) -> dict[str, Any]:
        """Claims the directory for a `fit` that resumes from memory; called on rank 0.

        Returns:
            As `choose`, with the name of the newest checkpoint, complete or not.
        """

        def newest() -> str | None:
            self._claim()
            return (self.directory.checkpoints(fit) or [None])[-1]

        return self._reply(newest)

    def _claim(self) -> bool:
        """Claims the directory; returns False if this process had claimed it before."""
        if self.directory is not None:
            return False
        directory = CheckpointDirectory(self.path, self.files, say)
        directory.claim()
        self.directory = directory
        return True

    def _reply(self, find: Callable[[], str | None]) -> dict[str, Any]:
        name = error = None
        try:
            name = find()
        except (DirectoryInUse, NoWholeCheckpoint, OSError) as raised:
            error = str(raised)[:1300]  # Fits into a message of 8 KB in any script.
        return {"name": name, "job": self.job, "error": error}


_uses: dict[str, DirectoryUse] = {}


def use_directory(path: str) -> DirectoryUse:
    """Returns this process's use of a directory, which begins with the first call."""
    path = _full(path)
    if path not in _uses:
        files = open_files(path, say)
        if plan := _plan():
            fault = plan.fault if launched().rank == plan.rank else None
            counts = f"{plan.directory}.counts" if launched().rank == 0 else None
            files = Chaos(fault, counts)
        _uses[path] = DirectoryUse(path, files)
    return _uses[path]


def directory_path(directory: str | os.PathLike) -> str:
    """Returns the directory for checkpoints: the program's, or that of `tfdml chaos`."""
    plan = _plan()
    return plan.directory if plan else _full(os.fspath(directory))


def _full(path: str) -> str:
    path = path.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.abspath(path)


def _plan() -> FaultPlan | None:
    plan_json = setting(VARIABLE)
    return FaultPlan.from_json(plan_json) if plan_json else None


def leave_directory(path: str) -> None:
    """Releases a directory: the next `fit` that uses it counts as the program's first."""
    use = _uses.pop(_full(path), None)
    if use is None:
        return
    if use.chaos:
        use.chaos.end()
    if use.directory is not None:
        use.directory.release()
