"""Where the time of a step goes on each rank, and which rank the others wait for."""

import dataclasses
import socket

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfdml.strategies.session import session_of
from tfdml.strategies.step_clock import StepClock


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """Mean times of an epoch's steps on one rank, in seconds.

    Attributes:
        rank: The rank.
        host: Its machine.
        step: The whole step, from one batch's end to the next one's.
        compute: From the batch's arrival until all of the rank's gradients are there; exchanges
            that run meanwhile cost nothing.
        exchange: The exchange after that, from when the last rank has come.
        wait: What the rank waits for others before it.
        causes: The part, from 0 to 1, of all ranks' waiting that was for this one.
    """

    rank: int
    host: str
    step: float
    compute: float
    exchange: float
    wait: float
    causes: float


class StepMonitor(keras.callbacks.Callback):
    """Shows per epoch where each rank's time goes, and names a straggler.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.StepMonitor()])
    ```

    Times are read inside the step, on the CPU's clock of each rank; no clocks are compared. On
    GPUs, whose work is only queued by then, they show when it was queued. A fit's first step, which
    each rank traces in a time of its own, is left out. Needs a strategy of tfdml on several
    processes, else it does nothing.

    Args:
        threshold: From which part of a step, from 0 to 1, waiting for one rank is called a
            straggler's.

    Attributes:
        epochs: For each epoch what was shown: a list of `RankTimes`, by rank.

    Raises:
        ValueError: If `threshold` is not from 0 to 1.
    """

    def __init__(self, threshold: float = 0.1):
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(
                f"`threshold` must be a part of a step, from 0 to 1. Received: "
                f"threshold={threshold!r}."
            )
        self._threshold = threshold
        self._clock: StepClock | None = None
        self.epochs: list[list[RankTimes]] = []

    def set_model(self, model: keras.Model) -> None:
        """Puts the clock into the model's train step."""
        super().set_model(model)
        extended = getattr(model.distribute_strategy, "extended", None)
        collective = getattr(extended, "collective", None)
        if collective is None or collective.size == 1:
            return
        session = session_of(model)
        self._clock = session.observer(StepClock)
        if self._clock is None:
            self._clock = StepClock(collective)
            session.attach(self._clock)

    def on_train_begin(self, logs=None):
        """Leaves the first step out, which may be traced."""
        if self._clock is not None:
            self._clock.skip()

    def on_epoch_begin(self, epoch, logs=None):
        """Starts anew."""
        if self._clock is not None:
            self._clock.reset()

    def on_epoch_end(self, epoch, logs=None):
        """Gathers all ranks' times; rank 0 shows them."""
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
        return [
            RankTimes(rank, hosts[rank], *map(float, row), float(causes[rank]))
            for rank, row in enumerate(rows)
        ]

    def _show(self, epoch: int, times: list[RankTimes]) -> None:
        console = Console(highlight=False)
        table = Table(title=f"Epoch {epoch + 1}: mean times of a step, in ms")
        for column in ("rank", "host", "step", "compute", "exchange", "wait", "causes waiting"):
            table.add_column(column, justify="left" if column == "host" else "right")
        for t in times:
            cells = [f"{1000 * s:.2f}" for s in (t.step, t.compute, t.exchange, t.wait)]
            table.add_row(str(t.rank), t.host, *cells, f"{t.causes:.0%}")
        console.print(table)
        slow = max(times, key=lambda t: t.causes)
        waits = float(np.mean([t.wait for t in times if t is not slow]))
        if slow.causes > 0.5 and waits > self._threshold * slow.step:
            console.print(
                f"Rank {slow.rank} ({slow.host}) is a straggler: the others wait for it "
                f"{waits / slow.step:.0%} of each step, {slow.causes:.0%} of all waiting."
            )
