"""The callback of an elastic `fit`: commits, and resumes from a commit."""

from typing import TYPE_CHECKING, Any

import keras

from tfdml import topology
from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.callbacks.checkpoint.run import Progress
from tfdml.callbacks.checkpoint.training_state import TrainingState
from tfdml.schedules import scale_learning_rate
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback, begin_with
from tfdml.strategies.replicas.rank_state import RankState

if TYPE_CHECKING:
    from tfdml.elastic.state import KerasState

# Entries of a data position that change between epochs if the batch size follows the ranks.
_OF_BATCHES = {"batches", "batch_size", "steps_per_epoch"}


class Committer(ResumingCallback):
    """Callback that commits a `fit` to a state, and resumes it; see `KerasState.committer`.

    Args:
        state: State that keeps the commits.
        steps: Steps between commits, which also happen at the ends of epochs; None for only those.
        rule: Scaling rule of the learning rate when the number of ranks changes.
        checkpoint: Callback that also saves to disk.

    Raises:
        ValueError: If `steps` or `rule` is wrong.
        TypeError: If `checkpoint` is something else.
    """

    def __init__(
        self,
        state: "KerasState",
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
                f"`steps` must be None with rule={rule!r}, because batches change between epochs "
                f"alone. Received: steps={steps!r}."
            )
        if not isinstance(checkpoint, FaultTolerantCheckpoint | None):
            raise TypeError(
                f"`checkpoint` must be a `tfdml.callbacks.FaultTolerantCheckpoint`. Received: "
                f"checkpoint={checkpoint!r}."
            )
        self._state, self._every, self._rule = state, steps, rule
        self._disk = checkpoint
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
        self._others = [c for c in callbacks if c is not self]
        self._fit, self._state._fits = self._state._fits, self._state._fits + 1
        commit = self._state._commit
        self._commit = commit if commit is not None and commit.fit == self._fit else None
        self._is_over = commit is not None and commit.fit > self._fit
        self._epoch = self._step = 0
        if self._fit in self._state._callbacks:
            # This process has called this `fit` before: restore the callbacks' initial state.
            self._state._callbacks[self._fit].restore({}, {})
        saved = self._begin_on_disk(model)
        if self._commit is None:
            return saved
        data = self._commit.snapshot.shared["data"]
        kept = data.keys() - (_OF_BATCHES if self._rule != "none" else set())
        return {name: data[name] for name in kept}

    def _begin_on_disk(self, model: keras.Model) -> dict[str, Any] | None:
        """Returns the data position of the checkpoint on disk, if no rank has a commit."""
        if self._disk is None:
            return None
        self._state._checkpoints.append(self._disk)
        if self._commit is not None or self._is_over:
            progress = self._commit.progress if self._commit else Progress()
            self._disk.join_fit(model, self._others, progress)
            return None
        return self._disk.begin_fit(model, self._others)

    def on_train_begin(self, logs=None):
        """Restores the commit."""
        ranks = RankState(self.model)
        callbacks = self._state._callbacks[self._fit] = CallbackState(self._others)
        self._training = TrainingState(self.model, callbacks, self.data, ranks)
        if self._disk is not None:
            self._disk.data = self.data
            self._disk.on_train_begin(logs)
            self._epoch, self._step = self._disk.progress.epoch, self._disk.progress.step
        if self._is_over:
            begin_with(self.model, self.params["epochs"])
        if self._commit is not None:
            self._epoch, self._step = self._commit.epoch, self._commit.snapshot.shared["step"]
            over = self._commit.snapshot.shared["stopped"]
            begin_with(self.model, self.params["epochs"] if over else self._epoch)
            self._restore()
            self._scale(self._commit.size)
            if not self._step:
                self._commit = None

    def on_epoch_begin(self, epoch, logs=None):
        """Restores a commit within an epoch again; commits before the first epoch."""
        self._epoch = epoch
        if self._disk is not None:
            self._disk.on_epoch_begin(epoch, logs)
        if self._commit is not None:
            self._restore()
            self._commit = None
        elif self._state._commit is None or self._state._commit.fit < self._fit:
            # Not earlier: only from here on do all ranks have rank 0's weights.
            self._commit_now()

    def _restore(self) -> None:
        snapshot = self._commit.snapshot
        own = self._commit.own or [snapshot.own]
        self._training.restore(snapshot.shared, snapshot.tensors, own)

    def _scale(self, before: int) -> None:
        """Scales the learning rate if the number of ranks has changed."""
        now = self._state._strategy.extended.collective.size
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
        before, self._step = self._step, batch + 1
        if self._every and self._step // self._every > before // self._every:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        """Commits."""
        if self._disk is not None:
            self._disk.on_epoch_end(epoch, logs)
        self._epoch, self._step = epoch + 1, 0
        self._save()

    def on_train_end(self, logs=None):
        """Waits for the checkpoint's last write."""
        if self._disk is not None and not self._is_over:
            self._disk.on_train_end(logs)

    def end_fit(self) -> None:
        """Passes the end of the `fit` on to the checkpoint."""
        if self._disk is not None:
            self._disk.end_fit()

    def _save(self) -> None:
        self._commit_now()
        if topology.is_elastic() and self._state.hosts_have_changed():
            from horovod.common.exceptions import HostsUpdatedInterrupt

            if self._disk is not None:
                self._disk.wait()
            # Horovod's loop, which `run` has entered, continues after this exception.
            raise HostsUpdatedInterrupt(False)

    def _commit_now(self) -> None:
        snapshot = self._training.read(self._step)
        progress = self._disk.progress if self._disk is not None else None
        self._state.save(self._fit, self._epoch, snapshot, progress)
