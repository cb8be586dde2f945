"""Step times of each rank, and detection of a straggler."""

import dataclasses
import socket

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.step_clock import StepClock


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """Mean times of an epoch's steps on one rank, in seconds.

    Attributes:
        rank: The rank.
        host: Name of the rank's host.
        step: Duration of the whole step, from the end of one batch to the end of the next.
        compute: Time from the batch's arrival until all of the rank's gradients are ready;
            exchanges that overlap with it are not counted.
        exchange: Time of the exchange after that, from the arrival of the last rank.
        wait: Time that the rank waits for other ranks before that exchange.
        causes: Fraction, from 0 to 1, of all ranks' waiting that this rank caused.
        share: Fraction, from 0 to 1, of every batch's rows on which this rank worked; see
            `batch_split` of the strategies.
    """

    rank: int
    host: str
    step: float
    compute: float
    exchange: float
    wait: float
    causes: float
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
    `local_updates`, a round of local steps with its synchronization takes the place of a step. Does
    nothing without a strategy of tfdml on several processes.

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
        self._clock: StepClock | None = None
        self.epochs: list[list[RankTimes]] = []

    def set_model(self, model: keras.Model) -> None:
        """Adds the clock to the model's train step."""
        super().set_model(model)
        extended = getattr(model.distribute_strategy, "extended", None)
        collective = getattr(extended, "collective", None)
        if collective is None or collective.size == 1:
            return
        session = get_session(model)
        self._clock = session.observer(StepClock)
        if self._clock is None:
            self._clock = StepClock(collective)
            session.attach(self._clock)

    def on_train_begin(self, logs=None):
        """Leaves out the first step, which may be traced."""
        if self._clock is not None:
            self._clock.skip()

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the clock."""
        if self._clock is not None:
            self._clock.reset()

    def on_epoch_end(self, epoch, logs=None):
        """Gathers all ranks' times; rank 0 prints them."""
        if self._clock is None:
            return
        times = self._gather()
        self.epochs.append(times)
        if self._clock.collective.topology.is_chief:
            self._show(epoch, times)

    def _gather(self) -> list[RankTimes]:
        own, caused = self._clock.read()
        collective = self._clock.collective
        rows = collective.all_gather(tf.constant([own], tf.float64), "step_monitor/times").numpy()
        host = socket.gethostname().encode()[:64].ljust(64)
        names = collective.all_gather(tf.constant([list(host)], tf.uint8), "step_monitor/hosts")
        hosts = [bytes(name).decode(errors="replace").strip() for name in names.numpy().tolist()]
        causes = caused / caused.sum() if caused.sum() > 0 else np.zeros_like(caused)
        fractions = self.model.distribute_strategy.extended.batch_split.fractions
        shares = np.reshape(fractions, [collective.size, -1]).sum(1)
        return [
            RankTimes(rank, hosts[rank], *map(float, row), float(causes[rank]), float(shares[rank]))
            for rank, row in enumerate(rows)
        ]

    def _show(self, epoch: int, times: list[RankTimes]) -> None:
        console = Console(highlight=False)
        local = self.model.distribute_strategy.extended.local_updates
        unit = "step" if local is None else "round of local steps"
        table = Table(title=f"Epoch {epoch + 1}: mean times of a {unit}, in ms")
        columns = ["rank", "host", "share", "step", "compute", "exchange", "wait", "causes waiting"]
        for column in columns:
            table.add_column(column, justify="left" if column == "host" else "right")
        for t in times:
            cells = [f"{1000 * s:.2f}" for s in (t.step, t.compute, t.exchange, t.wait)]
            table.add_row(str(t.rank), t.host, f"{t.share:.1%}", *cells, f"{t.causes:.0%}")
        console.print(table)
        slow = max(times, key=lambda t: t.causes)
        waits = float(np.mean([t.wait for t in times if t is not slow]))
        # An epoch may be too short for a step to be measured.
        if slow.step > 0 and slow.causes > 0.5 and waits > self._threshold * slow.step:
            console.print(
                f"Rank {slow.rank} ({slow.host}) is a straggler: the others wait for it "
                f"{waits / slow.step:.0%} of each step, {slow.causes:.0%} of all waiting."
            )
