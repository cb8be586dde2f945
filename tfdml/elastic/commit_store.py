"""The last commit of an elastic job, in the memory of every rank."""

import copy
import dataclasses
from typing import Any

import tensorflow as tf

from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.checkpoint_run import Progress
from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.callbacks.checkpoint.training_state import OwnState, Snapshot


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
    def position(self) -> tuple[int, int, int]:
        """Position in the training: a later commit has a greater one."""
        return self.fit, self.epoch, self.snapshot.shared["step"]


class CommitStore:
    """Keeps the last commit, and what the calls of `fit` need to resume from it.

    Args:
        strategy: Strategy of the model.
        values: The user's values, by name.

    Attributes:
        commit: The last commit; None before the first.
        values: A copy of the user's values, of the time of the commit.
    """

    def __init__(self, strategy: tf.distribute.Strategy, values: dict[str, Any]):
        self._strategy = strategy
        self.commit: Commit | None = None
        self.values = copy.deepcopy(values)
        self._fits = 0
        self._callbacks: dict[int, CallbackState] = {}
        self._checkpoints: list[FaultTolerantCheckpoint] = []
        # Messages of Horovod's driver about hosts, since the ranks last met.
        self._messages: list[tuple[float, int]] = []

    @property
    def size(self) -> int:
        """The present number of ranks."""
        return self._strategy.extended.collective.size

    # -- One call of the training function ---------------------------------------------------

    def begin_again(self) -> None:
        """The training function is called again: its next `fit` is its first."""
        self._fits = 0

    def next_fit(self) -> int:
        """Returns the index of the `fit` that begins; restores its callbacks' initial state."""
        fit, self._fits = self._fits, self._fits + 1
        if fit in self._callbacks:
            self._callbacks[fit].restore({}, {})
        return fit

    def keep_callbacks(self, fit: int, state: CallbackState) -> None:
        """Keeps the initial state of a `fit`'s callbacks, for a later call of the same `fit`."""
        self._callbacks[fit] = state

    def keep_checkpoint(self, checkpoint: FaultTolerantCheckpoint) -> None:
        """Keeps a callback that writes to disk, to end its write when the ranks change."""
        self._checkpoints.append(checkpoint)

    def save(
        self,
        fit: int,
        epoch: int,
        snapshot: Snapshot,
        progress: Progress | None,
        values: dict[str, Any],
    ) -> None:
        """Stores a commit, and a copy of the user's values."""
        self.values = copy.deepcopy(values)
        snapshot = dataclasses.replace(snapshot, shared=copy.deepcopy(snapshot.shared))
        self.commit = Commit(fit, epoch, snapshot, self.size, copy.deepcopy(progress))

    # -- When the ranks change ---------------------------------------------------------------

    def leave(self) -> None:
        """Gives up what was shared with the former ranks: checkpoints that are being written."""
        for checkpoint in self._checkpoints:
            checkpoint.leave_fit()
        self._checkpoints.clear()

    def take_newest(self) -> None:
        """Takes over the newest commit of the present ranks; a collective call."""
        import horovod.tensorflow as hvd

        commit = self.commit
        mine = (commit.position, commit.snapshot.own) if commit else ((-1,), None)
        found = hvd.allgather_object(mine, name="elastic_met")
        # Not always rank 0's: it may have just joined, or the loss fell between two ranks' commits.
        newest = max(position for position, _ in found)
        root = [position for position, _ in found].index(newest)
        sent = (self.commit, self.values) if hvd.rank() == root else None
        self.commit, self.values = hvd.broadcast_object(sent, root, name="elastic_commit")
        if self.commit is not None:
            self.commit.own = [own for position, own in found if position == newest]

    def note_hosts(self, timestamp: float, result: int) -> None:
        """Records a change of hosts; called by a thread of Horovod's driver."""
        self._messages.append((timestamp, result))

    @property
    def hosts_pending(self) -> bool:
        """Whether this rank has heard of a change of hosts since the ranks last met."""
        return bool(self._messages)

    def forget_hosts(self) -> None:
        """Clears the changes of hosts, after the ranks have changed."""
        self._messages.clear()

    def hosts_have_changed(self) -> bool:
        """Returns whether hosts have joined or left, the same on all ranks; a collective call."""
        import horovod.tensorflow as hvd

        results = [result for _, result in list(self._messages)]
        return any(hvd.allgather_object(results, name="elastic_hosts"))
