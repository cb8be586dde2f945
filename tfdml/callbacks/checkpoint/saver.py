"""Writing of a rank's part of a checkpoint in a thread; errors are reported later."""

import contextlib
import threading
import time

import numpy as np

from tfdml import checkpointing
from tfdml.callbacks.checkpoint.checkpoint_options import CheckpointOptions
from tfdml.callbacks.checkpoint.directory_use import DirectoryUse, say
from tfdml.callbacks.checkpoint.training_state import Snapshot
from tfdml.checkpointing import CheckpointManifest, Writer
from tfdml.checkpointing.files import remove_tree
from tfdml.checkpointing.names import OWN
from tfdml.strategies.parameter_server.server_tables import ServerTables
from tfdml.strategies.replicas.rank_state import RankState
from tfdml.timeline.rank_timeline import Kind


class Saver:
    """Writes the checkpoints of one `fit`, one at a time.

    Args:
        use: This process's use of the directory.
        ranks: This rank's state, and the number of ranks.
        fit: Index of the call of `fit` in the program.
        job: Identifier that tells this job's files from those of dead jobs.
        options: Options, of which it uses how many to keep and how to write them.
        has_earlier: Whether this `fit` has a checkpoint already.
    """

    def __init__(
        self,
        use: DirectoryUse,
        ranks: RankState,
        fit: int,
        job: str,
        options: CheckpointOptions,
        has_earlier: bool,
    ):
        self._use, self._ranks, self._fit, self._job = use, ranks, fit, job
        self._options, self._has_earlier = options, has_earlier
        self._writer = Writer()
        self._given_up = threading.Event()
        self.write_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.busy

    def save(
        self, manifest: CheckpointManifest, snapshot: Snapshot, tables: ServerTables | None
    ) -> None:
        """Starts to write a snapshot; if not asynchronous, waits until it is written.

        Args:
            manifest: Manifest of the checkpoint.
            snapshot: State of this rank.
            tables: Variables that parameter servers save.
        """
        self.collect()
        tensors = self._own_part(snapshot.tensors)
        tensors |= {f"{OWN}{name}": value for name, value in snapshot.own.tensors.items()}
        self._use.saves += 1
        job = f"{self._job}-{self._use.saves}"
        notes = snapshot.own.notes
        if tables is not None:
            self._begin_on_servers(job, manifest, tables)
        recorder = self._ranks.recorder

        def write() -> None:
            with recorder.span(Kind.WRITE, manifest.directory):
                self._write(job, manifest, tensors, notes, tables)

        self._writer.submit(write)
        if not self._options.asynchronous:
            self.collect()

    def collect(self) -> None:
        """Waits for the last write, and reports or raises its error.

        Raises:
            OSError: If the write failed and such errors end training.
        """
        try:
            self._writer.wait()
        except OSError as error:
            earlier = "Earlier checkpoints are undamaged."
            if not self._has_earlier:
                earlier = "This training has no earlier checkpoint."
            message = f"A checkpoint could not be written to {self._use.path} on rank "
            message += f"{self._ranks.rank}: {error}. {earlier}"
            if self._options.raises:
                raise OSError(
                    f"{message} Fix the cause (free disk space, for example), and start the job "
                    f"again."
                ) from error
            say(f"WARNING: {message} Training continues without it.")

    def give_up(self) -> None:
        """Stops waiting for other ranks' parts, which are lost; removes partial checkpoints."""
        self._given_up.set()
        with contextlib.suppress(OSError):
            self._writer.wait()

    def _own_part(self, shared: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the part of the shared state that this rank writes."""
        written = [0] * self._ranks.size
        own = {}
        for name, value in shared.items():
            rank = written.index(min(written))
            written[rank] += value.nbytes
            if rank == self._ranks.rank:
                own[name] = value
        return own

    def _begin_on_servers(
        self, job: str, manifest: CheckpointManifest, tables: ServerTables
    ) -> None:
        """Has parameter servers write; removes what they have begun if one of them is lost."""
        files = self._use.files
        staging = checkpointing.staging_directory(files, self._use.path, manifest, job)
        try:
            tables.save(staging)
        except Exception:
            with contextlib.suppress(OSError):
                remove_tree(files, staging)
            raise

    def _write(
        self,
        job: str,
        manifest: CheckpointManifest,
        tensors: dict,
        notes: dict,
        tables: ServerTables | None,
    ) -> None:
        """Writes this rank's part, in the writer's thread."""
        began = time.perf_counter()
        use, rank = self._use, self._ranks.rank
        if rank == 0:
            use.directory.check_claim()
        checkpointing.save(
            use.files,
            use.path,
            job,
            rank,
            manifest,
            tensors,
            notes,
            server_members=None if tables is None else tables.members,
            given_up=lambda: self._given_up.is_set() or bool(tables and tables.is_server_lost),
        )
        if rank == 0:
            best = manifest.state["best"]
            best_names = [best[1]] if best else []
            use.directory.keep(self._options.max_to_keep, self._fit, best_names)
        self.write_seconds = time.perf_counter() - began
        self._has_earlier = True
