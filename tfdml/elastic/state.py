"""Elastic training state: a model's training and the user's values."""

import copy
from typing import Any

import keras

from tfdml import topology
from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.elastic.commit_store import CommitStore
from tfdml.elastic.committer import Committer
from tfdml.elastic.lost_ranks import translated
from tfdml.strategies.keras_seam.fit.resuming import ResumingCallback
from tfdml.strategies.keras_seam.step.sharded_optimizers import divide_all_again


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
                "`model` must be made in the scope of a `HorovodStrategy`, whose number "
                f"of ranks may change. Received: a model of {type(self._strategy).__name__}. Use "
                "`FaultTolerantCheckpoint` with another strategy."
            )
        # Divided state is made when the ranks have met: here every rank would have all of it.
        shards = self._strategy.extended.options.shards_optimizers and topology.is_elastic()
        if not model.optimizer.built and not shards:
            self._build()
        self._names = list(values)
        self.__dict__.update(values)
        self._commits = CommitStore(self._strategy, values)

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
        return Committer(self._commits, self._own_values, steps, rule, checkpoint)

    def _own_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    # -- Called by Horovod's loop --------------------------------------------------------------

    def sync(self) -> None:
        """Meets the current ranks, and takes over their newest commit."""
        translated(self._meet)()

    def _meet(self) -> None:
        self._commits.leave()
        self._strategy.extended.join(_collective())
        if self._strategy.extended.options.shards_optimizers:
            divide_all_again(self._strategy.extended)
        if not self._model.optimizer.built:
            self._build()
        self._model.train_function = self._model.test_function = None
        self._model.predict_function = None
        self._commits.take_newest()
        self.restore()

    def _build(self) -> None:
        with self._strategy.scope():
            self._model.optimizer.build(self._model.trainable_variables)

    def restore(self) -> None:
        """Rolls `values` back to the last commit; `fit` restores the training's part of it."""
        self._commits.begin_again()
        self.__dict__.update(copy.deepcopy(self._commits.values))

    def on_reset(self) -> None:
        """Clears the messages about hosts after the ranks have changed."""
        self._commits.forget_hosts()

    def on_hosts_updated(self, timestamp: float, result: int) -> None:
        """Records a change of hosts; called by a thread of Horovod's driver."""
        self._commits.note_hosts(timestamp, result)


def _collective() -> Collective:
    import horovod.tensorflow as hvd

    if hvd.size() == 1:
        return LocalCollective()
    from tfdml.collectives.horovod import HorovodCollective

    return HorovodCollective()
