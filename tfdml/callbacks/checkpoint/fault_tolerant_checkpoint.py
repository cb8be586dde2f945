"""Checkpoints of the whole training state, from which an interrupted job resumes."""

import atexit
import dataclasses
import datetime
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import keras

from tfdml.callbacks.checkpoint.best_epoch import BestEpoch
from tfdml.callbacks.checkpoint.checkpoint_options import CheckpointOptions
from tfdml.callbacks.checkpoint.checkpoint_run import CheckpointRun, Progress
from tfdml.callbacks.checkpoint.directory_use import (
    directory_path,
    leave_directory,
    say,
    use_directory,
)
from tfdml.callbacks.checkpoint.preemption import Preemption
from tfdml.callbacks.checkpoint.schedule import Schedule
from tfdml.runtime.immediate_exit import PREEMPTED_EXIT_CODE
from tfdml.strategies import keras_seam
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback


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
    - **Preemption**: after SIGTERM or a notice on any rank all ranks save after the same step, with
      `local_updates` after the next synchronization, and exit with code 75, on which schedulers and
      `tfdml launch --max-restarts` start the job again.

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
        on_preemption: Whether to save on SIGTERM. Or where to look for notices in addition, every
            five seconds: "aws", "azure" or "google", the cloud whose machines these are; or a
            function that returns whether the machine is about to be preempted.
        resume: Whether to resume from existing checkpoints. False deletes them; remove it again
            before the job is restarted.
        allow_fresh_start: Whether to train from scratch if all checkpoints are damaged.
        on_write_error: Action if a checkpoint cannot be written, because the disk is full for
            example: "raise", at the next save or at the end; or "warn" and continue.
        keep_best_mode: "min" or "max"; "auto" takes "min" for names with "loss" or "error".
        on_change: Action if the optimizer, the data or the callbacks are not those of the
            checkpoint: "error"; or "accept", which resumes with those of the program, and says what
            is lost. A changed learning rate loses nothing; another optimizer begins without its
            state; other data, such as another batch size, begin the epoch again.

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
        on_preemption: bool | str | Callable[[], bool] = True,
        *,
        resume: bool = True,
        allow_fresh_start: bool = False,
        on_write_error: str = "raise",
        keep_best_mode: str = "auto",
        on_change: str = "error",
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
            ("on_change", on_change, ("error", "accept")),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}. Received: {value!r}.")
        if keep_best is not None and not isinstance(keep_best, str):
            raise ValueError(
                f"`keep_best` must be a name in the logs, such as 'val_loss'. Received: "
                f"keep_best={keep_best!r}. The number of checkpoints is `max_to_keep`."
            )
        keras_seam.install()
        self.directory = directory_path(directory)
        self._options = CheckpointOptions(
            save_freq=save_freq,
            max_to_keep=max_to_keep,
            asynchronous=asynchronous,
            raises=on_write_error == "raise",
            best=BestEpoch(keep_best, keep_best_mode),
            accepts_changes=on_change == "accept",
        )
        self.accepts_changes = on_change == "accept"
        self._resume, self._allow_fresh_start = resume, allow_fresh_start
        self._preemption = Preemption(on_preemption)
        # The current `fit`, or the last one.
        self._run: CheckpointRun | None = None
        use_directory(self.directory)  # Fails now if a store's plug-in is missing.

    @property
    def progress(self) -> Progress:
        """Progress of the current `fit`."""
        return self._run.progress

    def begin_fit(self, model: keras.Model, callbacks: list) -> dict[str, Any] | None:
        """Chooses the checkpoint, the same on all ranks; returns its data position."""
        use = use_directory(self.directory)

        def choose(fit: int) -> dict[str, Any]:
            return use.choose(fit, self._resume, self._allow_fresh_start)

        self._begin(model, callbacks, choose)
        return self._run.read()

    def join_fit(self, model: keras.Model, callbacks: list, progress: Progress) -> None:
        """Replaces `begin_fit` for a `fit` that resumes from memory: nothing is read."""
        self._begin(model, callbacks, use_directory(self.directory).take_over)
        self._run.progress = dataclasses.replace(progress)

    def _begin(
        self, model: keras.Model, callbacks: list, choose: Callable[[int], dict[str, Any]]
    ) -> None:
        self._preemption.start()
        self._run = None
        others = [c for c in callbacks if c is not self]
        use = use_directory(self.directory)
        self._run = CheckpointRun(self._options, use, model, others, choose)
        self._preemption.vote_with(model, self._run.ranks.size)

    def leave_fit(self) -> None:
        """Gives up the current write and the directory, because ranks have left or joined."""
        if self._run is not None:
            self._run.give_up()
        leave_directory(self.directory)

    def wait(self) -> None:
        """Waits for the current write; a collective call."""
        self._run.wait()

    def ignore_preemption(self) -> None:
        """Handles no SIGTERM: it ends one rank of an elastic job, and the others continue."""
        self._preemption.ignore()

    def forget_preemption(self) -> None:
        """Continues after the save that a preemption has asked for; all ranks call this."""
        self._preemption.forget()

    def on_train_begin(self, logs=None):
        """Restores the state, if there is one."""
        self._run.start(self.data, self.params["epochs"])

    def on_epoch_begin(self, epoch, logs=None):
        """Restores the state again within an epoch."""
        self._run.begin_epoch(epoch)

    def on_train_batch_end(self, batch, logs=None):
        """Saves if it is due; ends the process if it was asked to end.

        With local updates, both wait for the next synchronization.
        """
        self.data.used(logs)
        self._run.note_batch(batch)
        if self._preemption.agreed and self._run.ranks.is_synchronized:
            self._run.save()
            self.leave()
        elif self._run.is_due():
            self._run.save()

    def on_epoch_end(self, epoch, logs=None):
        """Saves after an epoch if configured or if it is the best, and after the last one.

        Ends the process if it was asked to end since the last step.
        """
        best = self._run.end_epoch(epoch, logs or {})
        finished = self.model.stop_training or self.progress.epoch >= self.params["epochs"]
        asked = self._preemption.agreed
        if best or finished or asked or self._options.save_freq == "epoch":
            self._run.save(finished)
        if asked:
            self.leave()

    def on_train_end(self, logs=None):
        """Waits for the last write, and repeats it if it was given up when a rank was lost."""
        self._run.save(finished=True)
        self._run.end()

    def can_resume(self) -> bool:
        """Returns whether this `fit`, which has failed, has a complete checkpoint."""
        return self._run is not None and use_directory(self.directory).has_checkpoint()

    def end_fit(self, error: BaseException | None) -> None:
        """Waits for the current write, and stops listening for preemption."""
        self._preemption.stop()
        if self._run is not None:
            self._run.forget_saved()
            if error is None:
                self._run.collect()
        # After an error the next `fit`, such as a notebook's cell that is run again, resumes it.
        use_directory(self.directory).end_fit(self._run, error)

    def leave(self) -> None:
        """Ends this process after the save that a preemption has asked for; all ranks call this."""
        self._run.collect()
        # The first rank to exit ends the others, so wait until all parts are written.
        self._run.ranks.any_rank(True)
        if self._run.ranks.rank == 0:
            now = self.progress
            say(f"preempted, saved after step {now.step} of epoch {now.epoch}.")
        # Launchers send SIGTERM to the others when the first rank has ended.
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        sys.exit(PREEMPTED_EXIT_CODE)
