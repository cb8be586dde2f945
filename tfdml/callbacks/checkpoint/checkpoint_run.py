"""One `fit` that saves checkpoints: its ranks, progress and writes, until its last save."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.checkpoint_options import CheckpointOptions
from tfdml.callbacks.checkpoint.cost import SaveCost
from tfdml.callbacks.checkpoint.directory_use import DirectoryUse, say
from tfdml.callbacks.checkpoint.saved_state import SavedState
from tfdml.callbacks.checkpoint.saver import Saver
from tfdml.callbacks.checkpoint.schedule import Schedule
from tfdml.callbacks.checkpoint.training_state import TrainingState
from tfdml.checkpointing import CheckpointManifest
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.data.data_position import DataPosition
from tfdml.strategies.keras_seam.fit.resuming import begin_with
from tfdml.strategies.parameter_server.server_tables import ServerTables
from tfdml.strategies.replicas.rank_state import RankState
from tfdml.timeline.rank_timeline import Kind


@dataclasses.dataclass
class Progress:
    """Progress of a `fit`.

    Attributes:
        epoch: The epoch, from 0.
        step: The number of the epoch's batches that have been used.
        total: The number of batches of all epochs that have been used.
        best: The best value so far of the metric `keep_best`, and its checkpoint; or None.
        metrics: The logs of the epoch that has just ended; empty within an epoch.
    """

    epoch: int = 0
    step: int = 0
    total: int = 0
    best: list | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class CheckpointRun:
    """One `fit` that resumes from a checkpoint and saves others, the same on all ranks.

    Args:
        options: Options of what is saved, and when.
        use: This process's use of the directory.
        model: The model that is trained.
        callbacks: The other callbacks of the `fit`, whose state is saved too.
        choose: Function that rank 0 calls with the index of this `fit`; see `DirectoryUse.choose`.

    Attributes:
        ranks: State of this rank, and the exchanges with the others.
        progress: Progress of the `fit`.

    Raises:
        RuntimeError: If rank 0 can choose no checkpoint, or another job uses the directory.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        use: DirectoryUse,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        choose: Callable[[int], dict[str, Any]],
    ):
        self.ranks = RankState(model)
        self.progress = Progress()
        self._options, self._use = options, use
        self._model, self._callbacks = model, callbacks
        again = use.end_interrupted()
        self._fit = use.fits
        chosen = self.ranks.broadcast_json(choose(self._fit) if self.ranks.rank == 0 else None)
        if chosen["error"]:
            raise RuntimeError(chosen["error"])
        if chosen["name"] is None and self.ranks.rank == 0:
            self._say_what_begins(again)
        # Name of the newest checkpoint of this `fit`, read or written.
        self._newest: str | None = chosen["name"]
        self._saver = Saver(
            use,
            self.ranks,
            self._fit,
            chosen["job"],
            options,
            has_earlier=chosen["name"] is not None,
        )
        self._cost = SaveCost()
        # The checkpoint to resume from, until it has been restored for the last time.
        self._saved: SavedState | None = None
        # Known once the data have been set up; see `start`.
        self._training: TrainingState | None = None
        # Variables that parameter servers save and load themselves.
        self._tables: ServerTables | None = None
        self._schedule: Schedule | None = None

    def _say_what_begins(self, again: bool) -> None:
        """Says from where a `fit` without a checkpoint trains, where users may expect otherwise."""
        if again:
            say(
                f"the interrupted fit had saved nothing in {self._use.path}: epoch 0 begins "
                f"again, with the weights that the model has now."
            )
        elif self._fit and hasattr(sys, "ps1"):
            say(
                f"this is fit {self._fit + 1} of this session in {self._use.path}: it begins "
                f"with epoch 0, because those before are done. To continue them with more "
                f"`epochs`, restart the kernel."
            )

    def read(self) -> dict[str, Any] | None:
        """Reads the chosen checkpoint; returns its data position, or None if there is none."""
        if self._newest is None:
            return None
        self._saved = SavedState(self._use, self._newest)
        return self._saved.manifest.state["data"]

    def start(self, data: DataPosition, epochs: int) -> None:
        """Restores the state that was read, before the first epoch.

        Args:
            data: Position in the training data.
            epochs: Number of epochs of the `fit`.
        """
        callbacks = CallbackState(self._callbacks)
        self._training = TrainingState(self._model, callbacks, data, self.ranks)
        self._tables = self._training.leave_tables_to_servers(self._use.files, self._use.path, say)
        if self._saved is not None:
            self._resume(epochs)
        self._schedule = Schedule(
            self._options.save_freq, self.ranks.broadcast_json, self.progress.total
        )

    def _resume(self, epochs: int) -> None:
        path, saved = self._saved.path, self._saved.manifest
        state = saved.state
        changes = self._training.check(state, path, self._options.accepts_changes)
        # Steps of an epoch of other data say nothing about the present ones.
        step = 0 if self._training.data_changed else state["step"]
        self.progress = Progress(saved.epoch, step, saved.step, state["best"], saved.metrics)
        begin_with(self._model, epochs if state["stopped"] else saved.epoch)
        self._saved.restore(self._training)
        if self.ranks.rank == 0:
            what = "has finished" if saved.finished else f"continues at step {step}"
            say(f"epoch {saved.epoch} {what}, from {path}")
            if saved.epoch > epochs:
                say(
                    f"WARNING: `epochs` is {epochs}, and {saved.epoch} are trained already: the "
                    f"model has the state after {saved.epoch}, and none is trained."
                )
            for change in changes:
                say(f"accepted by on_change: {change}.")
            if state["step"] and not step:
                say(f"epoch {saved.epoch} begins again: {state['step']} of its batches were used.")
        if not self.progress.step:
            self._saved = None

    def begin_epoch(self, epoch: int) -> None:
        """Restores the state again if the epoch had begun: metrics, and changes by callbacks."""
        self.progress.epoch = epoch
        self._cost.pause()
        if self._saved is not None:
            self._saved.restore(self._training)
            self._saved = None

    def note_batch(self, batch: int) -> None:
        """Records that the epoch's batches up to index `batch` have been used."""
        if self._use.chaos:
            self._use.chaos.step()
        steps = batch + 1 - self.progress.step
        self.progress.total, self.progress.step = self.progress.total + steps, batch + 1
        self.progress.metrics = {}
        self._cost.step(steps, self._saver.busy)

    def is_due(self) -> bool:
        """Returns whether the schedule asks for a checkpoint after this step.

        With local updates, it waits for the next synchronization.
        """
        return self.ranks.is_synchronized and self._schedule.due(self.progress.total)

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> bool:
        """Records the end of an epoch; returns whether it is the best so far.

        Args:
            epoch: Index of the epoch.
            logs: Its logs.
        """
        now = self.progress
        now.epoch, now.step = epoch + 1, 0
        now.metrics = {name: float(value) for name, value in logs.items()}
        value = self._options.best.value(now.metrics, now.best[0] if now.best else None)
        if value is not None:
            now.best = [value, self._manifest().directory]
        return value is not None

    def save(self, finished: bool = False) -> None:
        """Saves the present state, unless its checkpoint exists; all ranks call this.

        Args:
            finished: Whether the `fit` has trained all its epochs.
        """
        name = self._manifest().directory
        # Names sort in the order of training.
        if self._newest is not None and name <= self._newest:
            return
        self._newest, began = name, time.perf_counter()
        with self.ranks.recorder.span(Kind.SAVE, name):
            self.wait()
            snapshot = self._training.read(self.progress.step)
            manifest = self._manifest(
                state={**snapshot.shared, "best": self.progress.best},
                metrics=self.progress.metrics,
                finished=finished,
                saved=time.time(),
            )
            self._saver.save(manifest, snapshot, self._tables)
        self._cost.saved(began, self._saver.write_seconds)
        get_session(self._model).checkpoint_stall += time.perf_counter() - began
        advice = self._cost.advice()
        if advice and self.ranks.rank == 0:
            say(advice)

    def wait(self) -> None:
        """Waits for the current write; all ranks call this."""
        if self.ranks.rank:
            self._saver.collect()
        # Rank 0's write waits for the others' parts; this exchange fails if one of them has died.
        self.ranks.any_rank(True)
        self._saver.collect()

    def collect(self) -> None:
        """Waits for this rank's current write alone."""
        self._saver.collect()

    def give_up(self) -> None:
        """Gives up the current write, because ranks have left or joined."""
        self._saver.give_up()

    def end(self) -> None:
        """Waits for the last write, and counts the operations on files for `tfdml chaos`."""
        self.wait()
        if self._use.chaos:
            self._use.chaos.note_counts()

    def forget_saved(self) -> None:
        """Releases the memory of the checkpoint that this `fit` resumed from."""
        self._saved = None

    def _manifest(self, **fields: Any) -> CheckpointManifest:
        fields = {"state": {}, "members": (), **fields}
        now = self.progress
        return CheckpointManifest(self._fit, now.epoch, now.total, self.ranks.size, **fields)
