"""Report of the ranks whose gradients a robust rule has left out."""

import socket

import keras
from rich.console import Console

from tfdml.collectives.texts import gather_texts
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.fit.log_order import AddsToLogs
from tfdml.strategies.observers.outlier_watch import OutlierWatch, RankGradients


class OutlierMonitor(AddsToLogs):
    """Names ranks whose gradients are far from the others', after every epoch.

    ```python
    strategy = tfdml.HorovodStrategy(gradient_aggregation=tfdml.aggregation.TrimmedMean(1))
    model.fit(dataset, callbacks=[tfdml.callbacks.OutlierMonitor()])
    ```

    A rank is an outlier in a step if its gradient's distance from the combined one is `threshold`
    times the median rank's, or if it is not finite. A rank that often is has bad data or bad
    memory, or a part of the data that is unlike the others'. With a single process, its devices are
    the ranks. Rank 0 prints. The worst rank's fraction of steps is in the epoch's logs as
    `outlier_steps`, from 0 to 1. Does nothing without `gradient_aggregation`, and on parameter
    servers, whose shares of a batch belong to no worker.

    Args:
        threshold: Multiple of the median rank's distance, above 1.

    Attributes:
        epochs: For each epoch a list of `RankGradients`, in rank order.

    Raises:
        ValueError: If `threshold` is not above 1.
    """

    def __init__(self, threshold: float = 2.0):
        super().__init__()
        if not threshold > 1:
            raise ValueError(
                f"`threshold` must be a multiple of the median rank's distance, above 1. Received: "
                f"threshold={threshold!r}."
            )
        self._threshold = threshold
        self._watch: OutlierWatch | None = None
        self._hosts: list[str] = []
        self.epochs: list[list[RankGradients]] = []

    def set_model(self, model: keras.Model) -> None:
        """Makes the model's train step record what is left out of each rank's gradient."""
        super().set_model(model)
        extended = getattr(model.distribute_strategy, "extended", None)
        options = getattr(extended, "options", None)
        if options is None or options.gradient_aggregation is None:
            return
        session, size = get_session(model), extended.collective.size
        if self._watch is None or session.observer(OutlierWatch) is not self._watch:
            ranks = size if size > 1 else extended.num_local_replicas
            self._watch = OutlierWatch(ranks, self._threshold)
            session.attach(self._watch)

    def on_train_begin(self, logs=None):
        """Gathers the names of the ranks' hosts; all ranks call this."""
        if self._watch is not None:
            collective = self.model.distribute_strategy.extended.collective
            self._hosts = gather_texts(collective, socket.gethostname(), "outliers/hosts")

    def on_epoch_begin(self, epoch, logs=None):
        """Begins the epoch's means."""
        if self._watch is not None:
            self._watch.reset()

    def on_epoch_end(self, epoch, logs=None):
        """Keeps the epoch's means; rank 0 names outliers."""
        if self._watch is None:
            return
        found = self._watch.read()
        self.epochs.append(found)
        if logs is not None:
            logs["outlier_steps"] = max((rank.often for rank in found), default=0.0)
        if not self.model.distribute_strategy.extended.should_save_summary:
            return
        console = Console(highlight=False, soft_wrap=True)
        for rank in found:
            if rank.often > 0.5 or rank.not_finite:
                console.print(f"Epoch {epoch + 1}: {self._in_words(rank)}")

    def _in_words(self, rank: RankGradients) -> str:
        single = len(self._hosts) == 1
        name = f"Device {rank.rank}" if single else f"Rank {rank.rank}"
        return (
            f"{name} ({self._hosts[0 if single else rank.rank]}) is an outlier in "
            f"{rank.often:.0%} of steps: its gradient is {rank.distance:.1f} times as far from the "
            f"combined one as the median rank's, {rank.cut:.0%} of it was left out, and it was not "
            f"finite in {rank.not_finite} steps. Check its memory and its data."
        )
