"""Checkpoints of the whole training state, from which an interrupted job resumes."""

import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import keras

from tfdml.callbacks.checkpoint.best_epoch import BestEpoch
from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.cost import SaveCost
from tfdml.callbacks.checkpoint.preemption import Preemption
from tfdml.callbacks.checkpoint.saved_state import SavedState
from tfdml.callbacks.checkpoint.saver import Saver
from tfdml.callbacks.checkpoint.schedule import Schedule
from tfdml.callbacks.checkpoint.session import end_session, placed, say, session_of
from tfdml.callbacks.checkpoint.training_state import TrainingState
from tfdml.checkpointing import CheckpointManifest
from tfdml.runtime.immediate_exit import PREEMPTED_EXIT_CODE
from tfdml.strategies import keras_seam
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback, begin_with
from tfdml.strategies.replicas.rank_state import RankState


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


class FaultTolerantCheckpoint(ResumingCallback):
    """Saves the whole state of a `fit`, and resumes from it when the program is started again.

    ```python
    model.fit(data, epochs=10, callbacks=[tfdml.callbacks.FaultTolerantCheckpoint("run1")])
    ```

    If the directory holds a checkpoint, training resumes from it, also within an epoch: weights,
    optimizers, metrics of the epoch so far, `History`, the state of other callbacks, random
    generators, the position in the data, and each rank's own state (compression residuals,
    accumulated gradients). On a CPU and with the same number of ranks, the result is bitwise
    identical to that of an uninterrupted run; with more or fewer ranks nothing is lost.

    - **Data.** Arrays and `tfdml.data` pipelines resume exactly. With other data the used batches
      are read again and dropped: for `tf.data` with seeded shuffles that is exact too. Arrays get
      a new order each epoch, from a seed that follows `keras.utils.set_random_seed`.
    - **Several `fit`s** of a program are distinguished by their order: one that had finished is
      not trained again, the next one resumes. If `epochs` has been raised, the additional epochs
      are trained. A run that `EarlyStopping` has ended stays ended.
    - **Other callbacks**: attributes that training has changed are saved; see
      `CallbackState` for callbacks of your own.
    - **A directory** is for one job at a time, and the same one on all ranks. A URL (`gs://`,
      `s3://`, ...) is read and written through the fsspec plug-in of the store; transient errors
      are retried for two minutes.
    - **The cost** is measured, and reported once: how often to save for 3.5 % of the time.
    - **Preemption**: after SIGTERM on any rank all ranks save after the same step, and exit with
      code 75, on which schedulers and `tfdml launch --max-restarts` start the job again.

    Args:
        directory: Directory of the checkpoints, a path or a URL; created if necessary.
        save_freq: "epoch", a number of steps, or a `datetime.timedelta`. The end of a `fit` is
            always saved.
        max_to_keep: The number of checkpoints to keep, 0 for all.
        keep_best: A name in the logs, such as "val_accuracy": the checkpoint of the epoch with its
            best value is kept in addition, and is saved at once.
        asynchronous: Whether training continues while the state is written. State that training
            changes meanwhile needs memory twice: at most the part that this rank writes, the
            state's size divided by the number of ranks.
        on_preemption: Whether to save on SIGTERM; or a function, called every five seconds, that
            returns whether the machine is about to be preempted: then SIGTERM counts too.
        resume: Whether to resume from existing checkpoints. False deletes them; remove it again
            before the job is restarted.
        allow_fresh_start: Whether to train from scratch if all checkpoints are damaged.
        on_write_error: Action if a checkpoint cannot be written, because the disk is full for
            example: "raise", at the next save or at the end; or "warn" and continue.
        keep_best_mode: "min" or "max"; "auto" takes "min" for names with "loss" or "error".

    Raises:
        ValueError: If an argument is wrong; in `fit`, if the model, the optimizer, the data or the
            callbacks differ from those that were saved.
        RuntimeError: In `fit`, if another job uses the directory, or all checkpoints are damaged.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        save_freq: str | int | datetime.timedelta = "epoch",
        max_to_keep: int = 3,
        keep_best: str | None = None,
        asynchronous: bool = True,
        on_preemption: bool | Callable[[], bool] = True,
        *,
        resume: bool = True,
        allow_fresh_start: bool = False,
        on_write_error: str = "raise",
        keep_best_mode: str = "auto",
    ):
        super().__init__()
        Schedule.check(save_freq)
        if type(max_to_keep) is not int or max_to_keep < 0:
            raise ValueError(
                f"`max_to_keep` must be 0 or positive. Received: max_to_keep={max_to_keep!r}."
            )
        for name, value, allowed in (
            ("on_write_error", on_write_error, ("raise", "warn")),
            ("keep_best_mode", keep_best_mode, ("auto", "min", "max")),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}. Received: {value!r}.")
        keras_seam.install()
        self.directory = placed(directory)
        self._save_freq, self._max_to_keep = save_freq, max_to_keep
        self._asynchronous, self._resume = asynchronous, resume
        self._allow_fresh_start, self._on_write_error = allow_fresh_start, on_write_error
        self._best = BestEpoch(keep_best, keep_best_mode)
        self._preemption = Preemption(on_preemption)
        self._saver: Saver | None = None
        session_of(self.directory)  # Fails now if a store's plug-in is missing.

    # -- Resuming ------------------------------------------------------------------------------

    def begin_fit(self, model: keras.Model, callbacks: list) -> dict[str, Any] | None:
        """Chooses the checkpoint, the same on all ranks; returns its data position."""

        def choice() -> dict[str, Any]:
            return self._session.choose(self._fit, self._resume, self._allow_fresh_start)

        self._take_part(model, callbacks, choice)
        if self._last is None:
            return None
        self._saved = SavedState(self._session, self._last)
        return self._saved.manifest.state["data"]

    def join_fit(self, model: keras.Model, callbacks: list, progress: Progress) -> None:
        """Replaces `begin_fit` for a `fit` that resumes from memory: nothing is read."""
        self._take_part(model, callbacks, lambda: self._session.take_over(self._fit))
        self.progress = dataclasses.replace(progress)

    def leave_fit(self) -> None:
        """Gives up the current write and the directory, because ranks have left or joined."""
        if self._saver is not None:
            self._saver.give_up()
        end_session(self.directory)

    def wait(self) -> None:
        """Waits for the current write; a collective call."""
        if self._ranks.rank:
            self._saver.collect()
        # Rank 0's write waits for the others' parts; this exchange fails if one of them has died.
        self._ranks.any_rank(True)
        self._saver.collect()

    def ignore_preemption(self) -> None:
        """Handles no SIGTERM: it ends one rank of an elastic job, and the others continue."""
        self._preemption.ignore()

    def _take_part(
        self, model: keras.Model, callbacks: list, choose: Callable[[], dict[str, Any]]
    ) -> None:
        """Begins a `fit`; rank 0 calls `choose`, see `Session`."""
        self._preemption.start()
        self._ranks = RankState(model)
        self._session = session_of(self.directory)
        self._others = [c for c in callbacks if c is not self]
        self._fit, self._session.fits = self._session.fits, self._session.fits + 1
        chosen = self._ranks.broadcast_json(choose() if self._ranks.rank == 0 else None)
        if chosen["error"]:
            raise RuntimeError(chosen["error"])
        self._saver = Saver(
            self._session,
            self._ranks,
            self._fit,
            chosen["job"],
            self._max_to_keep,
            self._asynchronous,
            raises=self._on_write_error == "raise",
        )
        self._cost = SaveCost()
        self.progress = Progress()
        self._last, self._saved = chosen["name"], None
        self._preemption.vote_with(model, self._ranks.size)

    def on_train_begin(self, logs=None):
        """Restores the state, if there is one."""
        callbacks = CallbackState(self._others)
        self._training = TrainingState(self.model, callbacks, self.data, self._ranks)
        if self._saved is not None:
            path, saved = self._saved.path, self._saved.manifest
            state = saved.state
            self._training.check(state, path)
            best = state["best"]
            self.progress = Progress(saved.epoch, state["step"], saved.step, best, saved.metrics)
            begin_with(self.model, self.params["epochs"] if state["stopped"] else saved.epoch)
            self._saved.restore(self._training)
            if self._ranks.rank == 0:
                what = "has finished" if saved.finished else f"goes on at step {state['step']}"
                say(f"epoch {saved.epoch} {what}, from {path}")
            if not self.progress.step:
                self._saved = None
        self._schedule = Schedule(self._save_freq, self._ranks.broadcast_json, self.progress.total)

    def on_epoch_begin(self, epoch, logs=None):
        """Restores the state again within an epoch: its metrics, and changes by other callbacks."""
        self.progress.epoch = epoch
        self._cost.pause()
        if self._saved is not None:
            self._saved.restore(self._training)
            self._saved = None

    # -- When to save --------------------------------------------------------------------------

    def on_train_batch_end(self, batch, logs=None):
        """Saves if it is due; ends the process if it was asked to end."""
        if self._session.chaos:
            self._session.chaos.step()
        self.data.used(logs)
        steps = batch + 1 - self.progress.step
        self.progress.total, self.progress.step = self.progress.total + steps, batch + 1
        self.progress.metrics = {}
        self._cost.step(steps, self._saver.busy)
        if self._preemption.agreed:
            self._save(finished=False)
            self._leave()
        elif self._schedule.due(self.progress.total):
            self._save(finished=False)

    def on_epoch_end(self, epoch, logs=None):
        """Saves after an epoch if configured or if it is the best, and after the last one."""
        self.progress.epoch, self.progress.step = epoch + 1, 0
        self.progress.metrics = {name: float(value) for name, value in (logs or {}).items()}
        finished = self.model.stop_training or self.progress.epoch >= self.params["epochs"]
        best = self._is_best()
        if best or finished or self._save_freq == "epoch":
            self._save(finished)

    def on_train_end(self, logs=None):
        """Waits for the last write, and repeats it if it was given up when a rank was lost."""
        self._save(finished=True)
        self.wait()
        if self._session.chaos:
            self._session.chaos.note_counts()

    def end_fit(self) -> None:
        """Waits for the current write, and stops listening for preemption."""
        self._preemption.stop()
        self._saved = None
        if sys.exc_info()[0] is None:
            self._saver.collect()

    def _leave(self) -> None:
        self._saver.collect()
        # The first rank to exit ends the others, so wait until all parts are written.
        self._ranks.any_rank(True)
        if self._ranks.rank == 0:
            now = self.progress
            say(f"asked to end, saved after step {now.step} of epoch {now.epoch}.")
        sys.exit(PREEMPTED_EXIT_CODE)

    def _is_best(self) -> bool:
        """Records the epoch that has ended if it is the best so far; returns whether it is."""
        now = self.progress
        value = self._best.value(now.metrics, now.best[0] if now.best else None)
        if value is not None:
            now.best = [value, self._named().directory]
        return value is not None

    # -- How to save ---------------------------------------------------------------------------

    def _named(self, **fields: Any) -> CheckpointManifest:
        fields = {"state": {}, "members": (), **fields}
        now = self.progress
        return CheckpointManifest(self._fit, now.epoch, now.total, self._ranks.size, **fields)

    def _save(self, finished: bool) -> None:
        name = self._named().directory
        # Names sort in the order of training, so this skips checkpoints that already exist.
        if self._last is not None and name <= self._last:
            return
        self._last, began = name, time.perf_counter()
        self.wait()
        snapshot = self._training.read(self.progress.step)
        fields = {"metrics": self.progress.metrics, "finished": finished, "saved": time.time()}
        state = {**snapshot.shared, "best": self.progress.best}
        self._saver.save(self._named(state=state, **fields), snapshot)
        self._cost.saved(began, self._saver.write_seconds)
        advice = self._cost.advice()
        if advice and self._ranks.rank == 0:
            say(advice)
