"""Step times of each rank, and detection of a straggler."""

import dataclasses

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from tfdml.callbacks.performance.job_times import JobTimes, RankSums
from tfdml.callbacks.performance.reader import make_reader
from tfdml.callbacks.performance.server_times import ServerTimes
from tfdml.strategies.parameter_server.strategy import ParameterServerStrategy
from tfdml.strategies.replicas.rank_state import RankState


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """Mean times of an epoch's steps on one rank, in seconds; None if they cannot be known.

    Attributes:
        rank: The rank.
        host: Name of the rank's host.
        step: Duration of the whole step, from the end of one batch to the end of the next.
        compute: Time from the batch's arrival until all of the rank's gradients are ready;
            exchanges that overlap with it are not counted.
        exchange: Time of the exchange after that, from the arrival of the last rank.
        wait: Time that the rank waits for other ranks before that exchange.
        data_wait: Time from the end of a step until the next batch has arrived: reading data, and
            what Python does between steps.
        causes: Fraction, from 0 to 1, of all ranks' waiting that this rank caused.
        share: Fraction, from 0 to 1, of every batch's rows on which this rank worked; see
            `batch_split` of the strategies.
    """

    rank: int
    host: str
    step: float
    compute: float
    exchange: float | None
    wait: float | None
    data_wait: float | None
    causes: float | None
    share: float


class StepMonitor(keras.callbacks.Callback):
    """Shows the step times and the share of rows of each rank after every epoch.

    It names a straggler.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.StepMonitor()])
    ```

    Times are read inside the step, on the CPU's clock of each rank; clocks of different ranks are
    not compared. GPU work is only queued at these points, so times show when it was queued. The
    first step of a `fit` is left out, because each rank takes its own time to trace it. With
    `local_updates`, a round of local steps with its synchronization takes the place of a step. The
    workers of parameter servers are ranks, too; asynchronous ones exchange and wait for nothing.
    Does nothing without a strategy of tfdml on several processes.

    Args:
        threshold: Fraction of a step, from 0 to 1, above which waiting for one rank makes that rank
            a straggler.

    Attributes:
        epochs: The times shown for each epoch: a list of `RankTimes`, in rank order.

    Raises:
        ValueError: If `threshold` is not from 0 to 1.
    """

    def __init__(self, threshold: float = 0.1):
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(
                f"`threshold` must be a fraction of a step, from 0 to 1. Received: "
                f"threshold={threshold!r}."
            )
        self._threshold = threshold
        self._times: JobTimes | ServerTimes | None = None
        self.epochs: list[list[RankTimes]] = []

    def set_model(self, model: keras.Model) -> None:
        """Adds the clock to the model's train step."""
        super().set_model(model)
        strategy, ranks = model.distribute_strategy, RankState(model)
        self._is_chief = ranks.rank == 0
        if ranks.size > 1 or isinstance(strategy, ParameterServerStrategy):
            self._times = make_reader(model)

    def on_train_begin(self, logs=None):
        """Leaves out the first step, which may be traced."""
        if self._times is not None:
            self._times.begin_fit()

    def on_epoch_begin(self, epoch, logs=None):
        """Begins the epoch's sums."""
        if self._times is not None:
            self._times.begin_epoch()

    def on_epoch_end(self, epoch, logs=None):
        """Gathers all ranks' times; rank 0 prints them."""
        if self._times is None:
            return
        times = [_mean_times(rank) for rank in self._times.gather()[0]]
        self.epochs.append(times)
        if self._is_chief:
            self._show(epoch, times)

    def _show(self, epoch: int, times: list[RankTimes]) -> None:
        console = Console(highlight=False)
        local = getattr(self.model.distribute_strategy.extended, "local_updates", None)
        unit = "step" if local is None else "round of local steps"
        table = Table(title=f"Epoch {epoch + 1}: mean times of a {unit}, in ms")
        columns = ["rank", "host", "share", "step", "compute", "exchange", "wait", "data wait"]
        for column in [*columns, "causes waiting"]:
            table.add_column(column, justify="left" if column == "host" else "right")
        for t in times:
            seconds = (t.step, t.compute, t.exchange, t.wait, t.data_wait)
            cells = ["" if s is None else f"{1000 * s:.2f}" for s in seconds]
            causes = "" if t.causes is None else f"{t.causes:.0%}"
            table.add_row(str(t.rank), t.host, f"{t.share:.1%}", *cells, causes)
        console.print(table)
        if times[0].causes is not None:
            self._name_straggler(console, times)

    def _name_straggler(self, console: Console, times: list[RankTimes]) -> None:
        slow = max(times, key=lambda t: t.causes)
        waits = float(np.mean([t.wait for t in times if t is not slow] or [0.0]))
        # An epoch may be too short for a step to be measured.
        if slow.step > 0 and slow.causes > 0.5 and waits > self._threshold * slow.step:
            console.print(
                f"Rank {slow.rank} ({slow.host}) is a straggler: the others wait for it "
                f"{waits / slow.step:.0%} of each step, {slow.causes:.0%} of all waiting."
            )


def _mean_times(rank: RankSums) -> RankTimes:
    sums = rank.sums
    rounds = max(sums.rounds, 1.0)
    seconds = (sums.step, sums.compute, sums.exchange, sums.wait, sums.data_wait)
    means = [None if s is None else s / rounds for s in seconds]
    return RankTimes(rank.rank, rank.host, *means, rank.causes, rank.share)
