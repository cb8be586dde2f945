"""How a rank's part of a checkpoint is written: in a thread, and what came of it is told later."""

import contextlib
import threading
import time

import numpy as np

from tfdml import checkpointing
from tfdml.callbacks.checkpoint_session import Session, say
from tfdml.callbacks.training_state import Snapshot
from tfdml.checkpointing import Manifest, Writer
from tfdml.strategies.rank_state import RankState

# What the names of a rank's own tensors begin with.
OWN = "rank/"


class Saver:
    """Writes the checkpoints of one `fit`, one at a time.

    Args:
        session: This process's use of the directory.
        ranks: This rank among all.
        fit: Which call of `fit` of the program.
        job: What tells this job's writing from that of dead ones.
        max_to_keep: How many checkpoints stay.
        asynchronous: Whether training goes on while a snapshot is written.
        raises: Whether what cannot be written ends training.
    """

    def __init__(
        self,
        session: Session,
        ranks: RankState,
        fit: int,
        job: str,
        max_to_keep: int,
        asynchronous: bool,
        raises: bool,
    ):
        self._session, self._ranks, self._fit, self._job = session, ranks, fit, job
        self._max_to_keep, self._asynchronous, self._raises = max_to_keep, asynchronous, raises
        self._writer = Writer()
        self._given_up = threading.Event()
        self.write_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._writer.busy

    def save(self, manifest: Manifest, snapshot: Snapshot) -> None:
        """Begins to write a snapshot, or has written it, if not asynchronous."""
        self.collect()
        tensors = self._own_part(snapshot.tensors)
        tensors |= {f"{OWN}{name}": value for name, value in snapshot.own.tensors.items()}
        self._session.saves += 1
        job = f"{self._job}-{self._session.saves}"
        notes = snapshot.own.notes
        self._writer.submit(lambda: self._write(job, manifest, tensors, notes))
        if not self._asynchronous:
            self.collect()

    def collect(self) -> None:
        """Waits for the last write, and says or raises what came of it.

        Raises:
            OSError: If it failed, and that is to end training.
        """
        try:
            self._writer.wait()
        except OSError as error:
            said = f"A checkpoint could not be written to {self._session.path} on rank "
            said += f"{self._ranks.rank}: {error}. Those from before are whole."
            if self._raises:
                raise OSError(f"{said} Make room, and start the job again.") from error
            say(f"WARNING: {said} Training goes on without it.")

    def give_up(self) -> None:
        """Waits for no other rank's part any more: some are lost. What is not whole is removed."""
        self._given_up.set()
        with contextlib.suppress(OSError):
            self._writer.wait()

    def _own_part(self, shared: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns what this rank writes of the state that all ranks have."""
        written = [0] * self._ranks.size
        own = {}
        for name, value in shared.items():
            rank = written.index(min(written))
            written[rank] += value.nbytes
            if rank == self._ranks.rank:
                own[name] = value
        return own

    def _write(self, job: str, manifest: Manifest, tensors: dict, notes: dict) -> None:
        """Writes this rank's part, in the writer's thread."""
        began = time.perf_counter()
        session, rank = self._session, self._ranks.rank
        if rank == 0:
            session.directory.check_claim()
        checkpointing.save(
            session.files,
            session.path,
            job,
            rank,
            manifest,
            tensors,
            notes,
            given_up=self._given_up.is_set,
        )
        if rank == 0:
            best = manifest.state["best"]
            session.directory.keep(self._max_to_keep, self._fit, [best[1]] if best else [])
        self.write_seconds = time.perf_counter() - began
