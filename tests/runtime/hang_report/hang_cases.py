"""Cases run by ranks: hangs that last until there is a report on them."""

import os
import signal
import threading
import time
from pathlib import Path

import keras

from tests.harness import rank_job
from tests.strategies.cases import compiled, data
from tfdml import topology
from tfdml.runtime.hang_report import job_files
from tfdml.runtime.hang_report.exchange_log import EXCHANGE_LOG, KEPT


def summaries() -> list[Path]:
    """Returns the summaries of this job's reports."""
    return sorted(Path(topology.job_directory()).glob("report-*/summary.txt"))


class SleepsUntilReported(keras.callbacks.Callback):
    """Sleeps on rank 1 until there is a report, which rank 0 asks for by a signal."""

    def __init__(self, rank: int):
        super().__init__()
        self._rank = rank
        self._known = len(summaries())

    def on_train_batch_end(self, batch, logs=None):
        if batch != 2:
            return
        if self._rank == 1:
            sleep_until_reported(self._known)
        else:
            threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGUSR1]).start()


def sleep_until_reported(known: int) -> None:
    """Sleeps until there is another summary."""
    deadline = time.monotonic() + 30
    while len(summaries()) == known and time.monotonic() < deadline:
        time.sleep(0.05)


def sleeping_in_a_callback() -> tuple[str, str]:
    """Returns the summary, and this rank's report."""
    x, y = data(72)
    strategy = rank_job.strategy()
    callback = SleepsUntilReported(strategy.rank)
    compiled(strategy).fit(x, y, batch_size=12, verbose=0, callbacks=[callback])
    summary = summaries()[-1]
    return summary.read_text(), (summary.parent / f"rank{strategy.rank}.txt").read_text()


def eager_exchanges_in_two_orders() -> None:
    """Rank 1 exchanges eagerly in another order; the guard ends the job."""
    strategy = rank_job.strategy(silence_limit=4.0)
    names = ["one", "other"]
    if strategy.rank == 1:
        names.reverse()
    import tensorflow as tf

    for name in names:
        strategy.extended.collective.all_reduce([tf.zeros([1])], name)


def last_exchanges(steps: int) -> tuple[list, dict[str, int], list[str]]:
    """Returns this rank's last exchanges and their numbers after a `fit`, and its stacks' files."""
    x, y = data(12 * steps)
    strategy = rank_job.strategy()
    before = dict(EXCHANGE_LOG.read()[1])
    compiled(strategy).fit(x, y, batch_size=12, verbose=0, shuffle=False)
    EXCHANGE_LOG.collect()
    exchanges, turns = EXCHANGE_LOG.read()
    assert len(exchanges) == KEPT or len(exchanges) == sum(turns.values()) < KEPT
    grown = {name: turns[name] - before.get(name, 0) for name in turns}
    found = job_files.open_stacks(os.getpid())
    return exchanges, grown, [] if found is None else [found[1].name]
