"""What survives the loss of ranks: the last commit, in the memory of every rank."""

import copy
import dataclasses
from typing import Any

import keras

from tfdml import topology
from tfdml.callbacks.callback_state import CallbackState
from tfdml.callbacks.training_state import OwnState, Snapshot, TrainingState
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.schedules import scale_learning_rate
from tfdml.strategies.keras_seam.resuming import ResumingCallback, begin_with
from tfdml.strategies.rank_state import RankState


@dataclasses.dataclass
class Commit:
    """A training at one moment.

    Attributes:
        fit: Which call of `fit` of the training function.
        epoch: The epoch that goes on from here.
        snapshot: The state, seen by this rank.
        size: The number of ranks that there were.
        own: What belonged to each rank that was there; empty until ranks have changed.
    """

    fit: int
    epoch: int
    snapshot: Snapshot
    size: int
    own: list[OwnState] = dataclasses.field(default_factory=list)

    @property
    def place(self) -> tuple[int, int, int]:
        """Where training was: a later commit has a greater one."""
        return self.fit, self.epoch, self.snapshot.shared["step"]


# What a position says of batches: another between epochs where their size follows the ranks.
_OF_BATCHES = {"batches", "batch_size", "steps_per_epoch"}


class KerasState:
    """The state of a model's training, kept in memory for `tfdml.elastic.run`.

    A rank that is lost takes its residuals of compression with it; those of the others go on.
    Whether the global batch and the learning rate follow the number of ranks, `committer` is told.

    Args:
        model: A built, compiled model, made in the scope of a `HorovodStrategy`.
        **values: Plain values of your own: attributes of the state that are committed, rolled back
            and sent to new ranks with the rest.
    """

    def __init__(self, model: keras.Model, **values: Any):
        if not model.built:
            raise ValueError("`model` must be built. Received: one without weights. Add an Input.")
        if not model.compiled or model.optimizer is None:
            raise ValueError("`model` must be compiled with an optimizer. Received: one without.")
        self._model = model
        self._strategy = model.distribute_strategy
        if not model.optimizer.built:
            with self._strategy.scope():
                model.optimizer.build(model.trainable_variables)
        self._names = list(values)
        self.__dict__.update(values)
        self._values = copy.deepcopy(values)
        self._commit: Commit | None = None
        self._fits = 0
        self._callbacks: dict[int, CallbackState] = {}
        # What Horovod's driver has told of hosts since the ranks have met.
        self._messages: list[tuple[float, int]] = []

    def committer(self, steps: int | None = None, rule: str = "none") -> ResumingCallback:
        """Returns a callback for `fit`: it commits each so many steps, and goes on from a commit.

        Args:
            steps: After how many steps, and at the end of each epoch; a loss of ranks costs at most
                so many steps again. None for the ends of epochs alone.
            rule: What becomes of the learning rate when the number of ranks changes; see
                `tfdml.schedules.scale_learning_rate`. "none" where the global batch stays the same.
                "linear" or "sqrt" where the function gives `fit` a batch size that follows
                `strategy.size`; commits are then at the ends of epochs alone, because within an
                epoch the batches stay what they are.

        Raises:
            ValueError: If an argument is wrong.
        """
        return _Committer(self, steps, rule)

    # -- What Horovod's loop calls -------------------------------------------------------------

    def sync(self) -> None:
        """Meets the ranks that there are now, and takes up the newest commit of theirs."""
        from tfdml.elastic.run import translated

        translated(self._meet)()

    def _meet(self) -> None:
        import horovod.tensorflow as hvd

        self._strategy.extended.join(_collective())
        self._model.train_function = self._model.test_function = None
        self._model.predict_function = None
        mine = (self._commit.place, self._commit.snapshot.own) if self._commit else ((-1,), None)
        met = hvd.allgather_object(mine, name="elastic_met")
        # Not rank 0's: it may have come just now, and one may have been lost between two commits.
        newest = max(place for place, _ in met)
        root = [place for place, _ in met].index(newest)
        sent = (self._commit, self._values) if hvd.rank() == root else None
        self._commit, self._values = hvd.broadcast_object(sent, root, name="elastic_commit")
        if self._commit is not None:
            self._commit.own = [own for place, own in met if place == newest]
        self.restore()

    def restore(self) -> None:
        """Rolls back to the last commit; the training's part of it `fit` takes up."""
        self._fits = 0
        self.__dict__.update(copy.deepcopy(self._values))

    def save(self, fit: int, epoch: int, snapshot: Snapshot) -> None:
        """Keeps a commit."""
        self._values = copy.deepcopy({name: getattr(self, name) for name in self._names})
        shared = copy.deepcopy(snapshot.shared)
        size = self._strategy.extended.collective.size
        self._commit = Commit(fit, epoch, dataclasses.replace(snapshot, shared=shared), size)

    def on_reset(self) -> None:
        """Ranks have changed."""
        self._messages.clear()

    def on_hosts_updated(self, timestamp: float, result: int) -> None:
        """Hosts have come or gone, says Horovod's driver; called by a thread of its own."""
        self._messages.append((timestamp, result))

    def check_host_updates(self) -> None:
        """Ends `fit` on all ranks together where hosts have come or gone.

        Raises:
            HostsUpdatedInterrupt: Which `run` goes on after.
        """
        import horovod.tensorflow as hvd
        from horovod.common.exceptions import HostsUpdatedInterrupt

        told = list(self._messages)
        everybody = hvd.allgather_object([result for _, result in told], name="elastic_hosts")
        if any(everybody):
            raise HostsUpdatedInterrupt(False)


class _Committer(ResumingCallback):
    """Commits a `fit` to a state, and makes it go on from there."""

    def __init__(self, state: KerasState, steps: int | None, rule: str):
        super().__init__()
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"`steps` must be a positive integer. Received: steps={steps!r}.")
        scale_learning_rate(1.0, 1, rule)  # Checks it.
        if rule != "none" and steps is not None:
            raise ValueError(
                f"`steps` must be None with rule={rule!r}, because batches change between epochs "
                f"alone. Received: steps={steps!r}."
            )
        self._state, self._every, self._rule = state, steps, rule

    def begin_fit(self, model: keras.Model, callbacks: list) -> dict[str, Any] | None:
        """Returns the data's position in the commit, if it is of this `fit`."""
        self._others = [c for c in callbacks if c is not self]
        self._fit, self._state._fits = self._state._fits, self._state._fits + 1
        commit = self._state._commit
        self._commit = commit if commit is not None and commit.fit == self._fit else None
        self._is_over = commit is not None and commit.fit > self._fit
        self._epoch = self._step = 0
        if self._fit in self._state._callbacks:
            # As the program has made them; `fit` has been called before in this process.
            self._state._callbacks[self._fit].restore({}, {})
        if self._commit is None:
            return None
        data = self._commit.snapshot.shared["data"]
        kept = data.keys() - (_OF_BATCHES if self._rule != "none" else set())
        return {name: data[name] for name in kept}

    def on_train_begin(self, logs=None):
        """Restores the commit."""
        ranks = RankState(self.model)
        callbacks = self._state._callbacks[self._fit] = CallbackState(self._others)
        self._training = TrainingState(self.model, callbacks, self.data, ranks)
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
        """Restores the commit anew, within an epoch; before the first one, commits."""
        self._epoch = epoch
        if self._commit is not None:
            self._restore()
            self._commit = None
        elif self._state._commit is None or self._state._commit.fit < self._fit:
            # Not earlier: here all ranks have rank 0's weights.
            self._state.save(self._fit, self._epoch, self._training.read(0))

    def _restore(self) -> None:
        snapshot = self._commit.snapshot
        own = self._commit.own or [snapshot.own]
        self._training.restore(snapshot.shared, snapshot.tensors, own)

    def _scale(self, before: int) -> None:
        """Scales the learning rate where there are other ranks than before."""
        now = self._state._strategy.extended.collective.size
        if now == before or self._rule == "none":
            return
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        factor = scale_learning_rate(1.0, now, self._rule)
        factor /= scale_learning_rate(1.0, before, self._rule)
        self.model.optimizer.learning_rate = rate * factor

    def on_train_batch_end(self, batch, logs=None):
        """Commits, if it is time."""
        self.data.used(logs)
        before, self._step = self._step, batch + 1
        if self._every and self._step // self._every > before // self._every:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        """Commits."""
        self._epoch, self._step = epoch + 1, 0
        self._save()

    def _save(self) -> None:
        self._state.save(self._fit, self._epoch, self._training.read(self._step))
        if topology.is_elastic():
            self._state.check_host_updates()


def _collective() -> Collective:
    import horovod.tensorflow as hvd

    if hvd.size() == 1:
        return LocalCollective()
    from tfdml.collectives.horovod import HorovodCollective

    return HorovodCollective()
