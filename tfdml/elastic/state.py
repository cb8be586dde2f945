"""Elastic training state: the last commit, in the memory of every rank."""

import copy
import dataclasses
from typing import Any

import keras

from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.callbacks.checkpoint.run import Progress
from tfdml.callbacks.checkpoint.training_state import OwnState, Snapshot
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.elastic.committer import Committer
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback


@dataclasses.dataclass
class Commit:
    """State of a training at one moment.

    Attributes:
        fit: Index of the call of `fit` in the training function.
        epoch: The epoch in which training resumes.
        snapshot: The state as seen by this rank.
        size: The number of ranks at the time of the commit.
        progress: Progress of the `FaultTolerantCheckpoint` in use, if any.
        own: State of each rank at the time of the commit; empty until the ranks have changed.
    """

    fit: int
    epoch: int
    snapshot: Snapshot
    size: int
    progress: Progress | None = None
    own: list[OwnState] = dataclasses.field(default_factory=list)

    @property
    def place(self) -> tuple[int, int, int]:
        """Position in the training: a later commit has a greater one."""
        return self.fit, self.epoch, self.snapshot.shared["step"]


class KerasState:
    """State of a model's training, kept in memory for `tfdml.elastic.run`.

    The compression residuals of a lost rank are lost; those of the other ranks are kept. Whether
    the global batch and the learning rate follow the number of ranks is set in `committer`.

    Args:
        model: A built, compiled model, created in the scope of a `HorovodStrategy`.
        **values: Plain values of your own. They become attributes of the state, and are committed,
            rolled back and sent to new ranks with the rest.
    """

    def __init__(self, model: keras.Model, **values: Any):
        if not model.built:
            raise ValueError("`model` must be built. Received: one without weights. Add an Input.")
        if not model.compiled or model.optimizer is None:
            raise ValueError("`model` must be compiled with an optimizer. Received: one without.")
        self._model = model
        self._strategy = model.distribute_strategy
        if not hasattr(self._strategy.extended, "collective"):
            raise ValueError(
                "`model` must be made in the scope of a `HorovodStrategy`, whose ranks may come "
                f"and go. Received: a model of {type(self._strategy).__name__}. Use "
                "`FaultTolerantCheckpoint` with another strategy."
            )
        if not model.optimizer.built:
            with self._strategy.scope():
                model.optimizer.build(model.trainable_variables)
        self._names = list(values)
        self.__dict__.update(values)
        self._values = copy.deepcopy(values)
        self._commit: Commit | None = None
        self._fits = 0
        self._callbacks: dict[int, CallbackState] = {}
        self._checkpoints: list[FaultTolerantCheckpoint] = []
        # Messages of Horovod's driver about hosts, since the ranks last met.
        self._messages: list[tuple[float, int]] = []

    def committer(
        self,
        steps: int | None = None,
        rule: str = "none",
        checkpoint: FaultTolerantCheckpoint | None = None,
    ) -> ResumingCallback:
        """Returns a callback for `fit` that commits every `steps` steps and resumes from a commit.

        Args:
            steps: Steps between commits, which also happen at the end of each epoch; after a loss
                of ranks at most this many steps are repeated. None for only the ends of epochs.
            rule: Scaling rule of the learning rate when the number of ranks changes; see
                `tfdml.schedules.scale_learning_rate`. "none" if the global batch stays the same.
                "linear" or "sqrt" if the function passes `fit` a batch size that follows
                `strategy.size`; commits are then only at the ends of epochs, because batches cannot
                change within an epoch.
            checkpoint: Callback that also saves to disk, as often as it is configured to: a job
                that has lost all its ranks resumes from there when it is started again. Under
                Horovod Elastic a SIGTERM ends only its rank, because the others continue.

        Raises:
            ValueError: If an argument is wrong.
        """
        return Committer(self, steps, rule, checkpoint)

    # -- What Horovod's loop calls -------------------------------------------------------------

    def sync(self) -> None:
        """Meets the current ranks, and takes over their newest commit."""
        from tfdml.elastic.run import translated

        translated(self._meet)()

    def _meet(self) -> None:
        import horovod.tensorflow as hvd

        for checkpoint in self._checkpoints:
            checkpoint.leave_fit()
        self._checkpoints.clear()
        self._strategy.extended.join(_collective())
        self._model.train_function = self._model.test_function = None
        self._model.predict_function = None
        mine = (self._commit.place, self._commit.snapshot.own) if self._commit else ((-1,), None)
        met = hvd.allgather_object(mine, name="elastic_met")
        # Not always rank 0's: it may have just joined, or the loss fell between two ranks' commits.
        newest = max(place for place, _ in met)
        root = [place for place, _ in met].index(newest)
        sent = (self._commit, self._values) if hvd.rank() == root else None
        self._commit, self._values = hvd.broadcast_object(sent, root, name="elastic_commit")
        if self._commit is not None:
            self._commit.own = [own for place, own in met if place == newest]
        self.restore()

    def restore(self) -> None:
        """Rolls `values` back to the last commit; `fit` restores the training's part of it."""
        self._fits = 0
        self.__dict__.update(copy.deepcopy(self._values))

    def save(
        self, fit: int, epoch: int, snapshot: Snapshot, progress: Progress | None = None
    ) -> None:
        """Stores a commit."""
        self._values = copy.deepcopy({name: getattr(self, name) for name in self._names})
        shared = copy.deepcopy(snapshot.shared)
        size = self._strategy.extended.collective.size
        snapshot = dataclasses.replace(snapshot, shared=shared)
        self._commit = Commit(fit, epoch, snapshot, size, copy.deepcopy(progress))

    def on_reset(self) -> None:
        """Clears the messages about hosts after the ranks have changed."""
        self._messages.clear()

    def on_hosts_updated(self, timestamp: float, result: int) -> None:
        """Records a change of hosts; called by a thread of Horovod's driver."""
        self._messages.append((timestamp, result))

    def hosts_have_changed(self) -> bool:
        """Returns whether hosts have joined or left, the same on all ranks; a collective call."""
        import horovod.tensorflow as hvd

        told = [result for _, result in list(self._messages)]
        return any(hvd.allgather_object(told, name="elastic_hosts"))


def _collective() -> Collective:
    import horovod.tensorflow as hvd

    if hvd.size() == 1:
        return LocalCollective()
    from tfdml.collectives.horovod import HorovodCollective

    return HorovodCollective()
