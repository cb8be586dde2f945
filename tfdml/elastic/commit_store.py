"""The last commit of an elastic job, in the memory of every rank."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdml import topology
from tfdml.callbacks.checkpoint.callback_state import CallbackState
from tfdml.callbacks.checkpoint.checkpoint_run import Progress
from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.callbacks.checkpoint.training_state import OwnState, Snapshot
from tfdml.elastic.part_copies import Parts, SentParts, parts_of_previous


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
        is_divided: Whether optimizer state was divided among the ranks.
        parts: The parts of each rank at the time of the commit, if state was divided; empty until
            the ranks have changed.
    """

    fit: int
    epoch: int
    snapshot: Snapshot
    size: int
    progress: Progress | None = None
    own: list[OwnState] = dataclasses.field(default_factory=list)
    is_divided: bool = False
    parts: list[SentParts] = dataclasses.field(default_factory=list)

    @property
    def position(self) -> tuple[int, int, int]:
        """Position in the training: a later commit has a greater one."""
        return self.fit, self.epoch, self.snapshot.shared["step"]


@dataclasses.dataclass
class _Held:
    """A commit with what this rank alone holds of it.

    Attributes:
        commit: The commit, whose `snapshot.own` may be another rank's.
        values: The user's values at the time.
        own: This rank's state at the time; None if it has joined later.
        parts: Parts of divided optimizer state, by the rank that they belonged to at the time.
    """

    commit: Commit
    values: dict[str, Any]
    own: OwnState | None
    parts: dict[int, Parts]


class CommitStore:
    """Keeps the last commit, and what the calls of `fit` need to resume from it.

    A commit of divided optimizer state is complete when all ranks have it: until then the one
    before it is kept, too.

    Args:
        strategy: Strategy of the model.
        values: The user's values, by name.
    """

    def __init__(self, strategy: tf.distribute.Strategy, values: dict[str, Any]):
        self._strategy = strategy
        self._first_values = copy.deepcopy(values)
        # Newest first.
        self._held: list[_Held] = []
        self._saves_to_disk = False
        self._fits = 0
        self._callbacks: dict[int, CallbackState] = {}
        self._checkpoints: list[FaultTolerantCheckpoint] = []
        # Messages of Horovod's driver about hosts, since the ranks last met.
        self._messages: list[tuple[float, int]] = []

    @property
    def commit(self) -> Commit | None:
        """The last commit; None before the first."""
        return self._held[0].commit if self._held else None

    @property
    def values(self) -> dict[str, Any]:
        """A copy of the user's values, of the time of the commit."""
        return self._held[0].values if self._held else self._first_values

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
        self._saves_to_disk = True

    def save(
        self,
        fit: int,
        epoch: int,
        snapshot: Snapshot,
        progress: Progress | None,
        values: dict[str, Any],
    ) -> None:
        """Stores a commit, and a copy of the user's values; a collective call with `sharding`."""
        extended = self._strategy.extended
        sharding = extended.options.sharding
        is_divided = extended.options.shards_optimizers and self.size > 1 and topology.is_elastic()
        parts = snapshot.own.parts
        own = snapshot.own.without_parts()
        snapshot = dataclasses.replace(snapshot, shared=copy.deepcopy(snapshot.shared), own=own)
        progress = copy.deepcopy(progress)
        commit = Commit(fit, epoch, snapshot, self.size, progress, is_divided=is_divided)
        held = _Held(commit, copy.deepcopy(values), own, {})
        if not is_divided:
            self._held = [held]
            return
        rank = extended.collective.rank
        held.parts[rank] = parts
        self._held = [held, *self._held[:1]]
        # Also without copies, because it ends when all ranks have the commit.
        copies = parts_of_previous(parts if sharding.replicated else {}, rank, self.size)
        if sharding.replicated:
            held.parts[(rank - 1) % self.size] = copies
        self._held = [held]

    # -- When the ranks change ---------------------------------------------------------------

    def leave(self) -> None:
        """Gives up what was shared with the former ranks: checkpoints that are being written."""
        for checkpoint in self._checkpoints:
            checkpoint.leave_fit()
        self._checkpoints.clear()

    def take_newest(self) -> None:
        """Takes over the newest commit that the present ranks have; a collective call.

        Raises:
            RuntimeError: If a lost rank has taken its part of the optimizer's state along.
        """
        import horovod.tensorflow as hvd

        mine = [
            (h.commit.position, h.own, {r: list(parts) for r, parts in h.parts.items()})
            for h in self._held
        ]
        sizes = {h.commit.position: h.commit.size for h in self._held if h.commit.is_divided}
        found = hvd.allgather_object((mine, sizes), name="elastic_met")
        held_by = [{position: rest for position, *rest in of_rank} for of_rank, _ in found]
        divided = {position: size for _, of_rank in found for position, size in of_rank.items()}
        positions = sorted({position for of_rank in held_by for position in of_rank}, reverse=True)
        for position in positions:
            # The names of the parts of each former rank, and the rank that sends them.
            senders = {
                former: (rank, names)
                for rank, of_rank in reversed(list(enumerate(held_by)))
                for former, names in of_rank.get(position, (None, {}))[1].items()
            }
            if set(senders) >= set(range(divided.get(position, 0))):
                self._take(position, held_by, [senders[r] for r in sorted(senders)])
                return
        if positions and not any(hvd.allgather_object(self._saves_to_disk, name="elastic_disk")):
            raise RuntimeError(
                "With `sharding`, lost ranks must leave their parts of the optimizer's state to "
                "others. Received: a loss of ranks whose parts nobody else has. Use "
                "`tfdml.Sharding(replicated=True)`, which keeps each part on two ranks, or "
                "`state.committer(checkpoint=...)`, which resumes from the disk."
            )
        self._held = []

    def _take(
        self,
        position: tuple[int, int, int],
        held_by: Sequence[Mapping[tuple, Sequence]],
        senders: Sequence[tuple[int, list[str]]],
    ) -> None:
        """Takes over the commit of a position, and the parts that belong to it."""
        import horovod.tensorflow as hvd

        # Not always rank 0's: it may have just joined, or the loss fell between two ranks' commits.
        root = next(rank for rank, of_rank in enumerate(held_by) if position in of_rank)
        mine = next((h for h in self._held if h.commit.position == position), None)
        sent = None
        if hvd.rank() == root:
            sent = dataclasses.replace(mine.commit, own=[], parts=[]), mine.values
        commit, values = hvd.broadcast_object(sent, root, name="elastic_commit")
        owns = [of_rank[position][0] for of_rank in held_by if position in of_rank]
        commit.own = [own for own in owns if own is not None]
        parts = mine.parts if mine is not None else {}
        commit.parts = [
            SentParts(parts.get(former), rank, names)
            for former, (rank, names) in enumerate(senders)
        ]
        self._held = [_Held(commit, values, mine.own if mine is not None else None, parts)]

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
