"""The callback of an elastic `fit`: commits, and resumes from a commit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdml import topology
from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.checkpoint_run import Progress
from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.callbacks.checkpoint.training_state import TrainingState
from tfdml.elastic.commit_store import Commit, CommitStore
from tfdml.schedules import scale_learning_rate
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback, begin_with
from tfdml.strategies.replicas.rank_state import RankState

# Entries of a data position that change between epochs if the batch size follows the ranks.
_OF_BATCHES = {"batches", "batch_size", "steps_per_epoch"}


@dataclasses.dataclass
class _Fit:
    """One call of `fit` that commits.

    Attributes:
        number: Index of the call in the training function.
        callbacks: Its other callbacks.
        commit: Commit to resume from, until it has been restored for the last time.
        is_over: Whether a later `fit` has a commit, so that this one has ended.
        epoch: The epoch, from 0.
        step: The number of the epoch's batches that have been used.
        looked: Number of the epoch's batches when a commit could be made last.
        training: The state that is committed; None until training begins.
        ranks: State of this rank; None until training begins.
    """

    number: int
    callbacks: Sequence[keras.callbacks.Callback]
    commit: Commit | None
    is_over: bool
    epoch: int = 0
    step: int = 0
    looked: int = 0
    training: TrainingState | None = None
    ranks: RankState | None = None

    def restore(self) -> None:
        """Restores the training's state from the commit."""
        snapshot = self.commit.snapshot
        own = self.commit.own or [snapshot.own]
        self.training.restore(snapshot.shared, snapshot.tensors, own, self.commit.parts)


class Committer(ResumingCallback):
    """Callback that commits a `fit` to memory, and resumes it; see `KerasState.committer`.

    Args:
        commits: Store of the commits.
        values: Function that returns the user's values, which are committed too.
        steps: Steps between commits, which also happen at the ends of epochs; None for only those.
        rule: Scaling rule of the learning rate when the number of ranks changes.
        checkpoint: Callback that also saves to disk.

    Raises:
        ValueError: If `steps` or `rule` is wrong.
        TypeError: If `checkpoint` is something else.
    """

    def __init__(
        self,
        commits: CommitStore,
        values: Callable[[], dict[str, Any]],
        steps: int | None,
        rule: str,
        checkpoint: FaultTolerantCheckpoint | None,
    ):
        super().__init__()
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"`steps` must be a positive integer. Received: steps={steps!r}.")
        scale_learning_rate(1.0, 1, rule)  # Validates `rule`.
        if rule != "none" and steps is not None:
            raise ValueError(
                f"`steps` must be None with rule={rule!r}, because batches change "
                f"only between epochs. Received: steps={steps!r}."
            )
        if not isinstance(checkpoint, FaultTolerantCheckpoint | None):
            raise TypeError(
                f"`checkpoint` must be a `tfdml.callbacks.FaultTolerantCheckpoint`. Received: "
                f"checkpoint={checkpoint!r}."
            )
        self._commits, self._values = commits, values
        self._every, self._rule = steps, rule
        self._disk = checkpoint
        # The current `fit`, or the last one.
        self._fit: _Fit | None = None
        if checkpoint is not None and topology.is_elastic():
            checkpoint.ignore_preemption()

    def set_model(self, model: keras.Model) -> None:
        """Passes Keras's call on to the checkpoint."""
        super().set_model(model)
        if self._disk is not None:
            self._disk.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Passes Keras's call on to the checkpoint."""
        super().set_params(params)
        if self._disk is not None:
            self._disk.set_params(params)

    def begin_fit(self, model: keras.Model, callbacks: list) -> dict[str, Any] | None:
        """Returns the data position of the commit, if it belongs to this `fit`."""
        others = [c for c in callbacks if c is not self]
        number, newest = self._commits.next_fit(), self._commits.commit
        commit = newest if newest is not None and newest.fit == number else None
        is_over = newest is not None and newest.fit > number
        self._fit = _Fit(number, others, commit, is_over)
        saved = self._begin_on_disk(model)
        if commit is None:
            return saved
        data = commit.snapshot.shared["data"]
        names = data.keys() - (_OF_BATCHES if self._rule != "none" else set())
        return {name: data[name] for name in names}

    def _begin_on_disk(self, model: keras.Model) -> dict[str, Any] | None:
        """Returns the data position of the checkpoint on disk, if no rank has a commit."""
        if self._disk is None:
            return None
        self._commits.keep_checkpoint(self._disk)
        fit = self._fit
        if fit.commit is not None or fit.is_over:
            progress = fit.commit.progress if fit.commit else Progress()
            self._disk.join_fit(model, fit.callbacks, progress)
            return None
        return self._disk.begin_fit(model, fit.callbacks)

    def on_train_begin(self, logs=None):
        """Restores the commit."""
        fit = self._fit
        callbacks = CallbackState(fit.callbacks)
        self._commits.keep_callbacks(fit.number, callbacks)
        fit.ranks = RankState(self.model)
        fit.training = TrainingState(self.model, callbacks, self.data, fit.ranks)
        if self._disk is not None:
            self._disk.data = self.data
            self._disk.on_train_begin(logs)
            fit.epoch, fit.step = self._disk.progress.epoch, self._disk.progress.step
        if fit.is_over:
            begin_with(self.model, self.params["epochs"])
        if fit.commit is not None:
            shared = fit.commit.snapshot.shared
            fit.epoch, fit.step = fit.commit.epoch, shared["step"]
            begin_with(self.model, self.params["epochs"] if shared["stopped"] else fit.epoch)
            fit.restore()
            self._scale(fit.commit.size)
            if not fit.step:
                fit.commit = None

    def on_epoch_begin(self, epoch, logs=None):
        """Restores a commit within an epoch again; commits before the first epoch."""
        fit = self._fit
        fit.epoch, fit.looked = epoch, fit.step
        if self._disk is not None:
            self._disk.on_epoch_begin(epoch, logs)
        if fit.commit is not None:
            fit.restore()
            fit.commit = None
        elif self._commits.commit is None or self._commits.commit.fit < fit.number:
            # Not earlier: only from here on do all ranks have rank 0's weights.
            self._commit_now()

    def _scale(self, before: int) -> None:
        """Scales the learning rate if the number of ranks has changed."""
        now = self._commits.size
        if now == before or self._rule == "none":
            return
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        factor = scale_learning_rate(1.0, now, self._rule)
        factor /= scale_learning_rate(1.0, before, self._rule)
        self.model.optimizer.learning_rate = rate * factor

    def on_train_batch_end(self, batch, logs=None):
        """Commits, if it is due."""
        if self._disk is not None:
            self._disk.on_train_batch_end(batch, logs)
        else:
            self.data.used(logs)
        fit = self._fit
        fit.step = batch + 1
        if self._every and fit.ranks.is_synchronized:
            before, fit.looked = fit.looked, fit.step
            if fit.step // self._every > before // self._every:
                self._save()

    def on_epoch_end(self, epoch, logs=None):
        """Commits."""
        if self._disk is not None:
            self._disk.on_epoch_end(epoch, logs)
        self._fit.epoch, self._fit.step = epoch + 1, 0
        self._save()

    def on_train_end(self, logs=None):
        """Waits for the checkpoint's last write."""
        if self._disk is not None and not self._fit.is_over:
            self._disk.on_train_end(logs)

    def end_fit(self, error: BaseException | None) -> None:
        """Passes the end of the `fit` on to the checkpoint."""
        if self._disk is not None:
            self._disk.end_fit(error)

    def _save(self) -> None:
        self._commit_now()
        if topology.is_elastic() and self._commits.hosts_have_changed():
            from horovod.common.exceptions import HostsUpdatedInterrupt

            if self._disk is not None:
                self._disk.wait()
            # Horovod's loop, which `run` has entered, continues after this exception.
            raise HostsUpdatedInterrupt(False)

    def _commit_now(self) -> None:
        fit = self._fit
        snapshot = fit.training.read(fit.step)
        progress = self._disk.progress if self._disk is not None else None
        self._commits.save(fit.number, fit.epoch, snapshot, progress, self._values())
