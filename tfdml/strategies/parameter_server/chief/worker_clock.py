"""Clock on the chief for the steps of parameter servers' workers."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from tfdml.strategies.observers.step_clock import StepSums, StepTotals

_FIELDS = [field.name for field in dataclasses.fields(StepSums)][:-1]
_AT = {name: column for column, name in enumerate(_FIELDS)}


class WorkerClock:
    """Totals of each worker's steps, as `StepClock` has them of a rank's.

    A task's time has the way of its arguments and of its result, on which it reads variables and
    sends gradients. In synchronous training the workers wait for the slowest one; what then remains
    of a step, in which the chief adds up gradients and updates, counts as its exchange. In
    asynchronous training nothing but tasks can be told apart: the other times stay 0.

    Args:
        workers: The number of workers.
    """

    def __init__(self, workers: int):
        self._every = np.zeros([workers, len(_FIELDS)])
        self._counted = np.zeros_like(self._every)
        self._caused = np.zeros(workers)
        self._counts = False
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Excludes the next step from the counted ones."""
        self._counts = False

    def begin_epoch(self) -> None:
        """Starts the time of the next step now, because something else took place before."""
        self._last = time.perf_counter()

    def add_step(
        self,
        workers: Sequence[int],
        rows: Sequence[int],
        seconds: Sequence[float],
        data_wait: float,
    ) -> None:
        """Adds a synchronous step that has just ended.

        Args:
            workers: The worker that computed each share.
            rows: Rows of each share.
            seconds: Seconds that each share took.
            data_wait: Seconds in which the chief read the batch.
        """
        step = self._table()
        np.add.at(step[:, _AT["rows"]], workers, rows)
        np.add.at(step[:, _AT["compute"]], workers, seconds)
        compute = step[:, _AT["compute"]]
        step[:, [_AT["rounds"], _AT["steps"]]] = 1
        step[:, _AT["data_wait"]] = data_wait
        rest = step[0, _AT["step"]] - data_wait - compute.max()
        step[:, _AT["exchange"]] = max(rest, 0.0)
        # A worker without a share waits for nobody.
        wait = np.where(compute > 0, compute.max() - compute, 0.0)
        step[:, _AT["wait"]] = wait
        caused = np.zeros_like(self._caused)
        caused[compute.argmax()] = wait.sum()
        self._add(step, caused)

    def add_task(self, worker: int, steps: int, rows: float, seconds: float) -> None:
        """Adds an asynchronous task that has ended.

        Args:
            worker: The worker that ran it.
            steps: Number of its steps.
            rows: Rows of their batches.
            seconds: Seconds that it took.
        """
        task = self._table()
        numbers = {"rounds": steps, "steps": steps, "rows": rows, "compute": seconds}
        for name, value in numbers.items():
            task[worker, _AT[name]] = value
        self._add(task, 0.0)

    def _table(self) -> np.ndarray:
        """Returns a table for the time since the last call, which passes for all workers."""
        now = time.perf_counter()
        table = np.zeros_like(self._every)
        table[:, _AT["step"]] = now - self._last
        self._last = now
        return table

    def _add(self, table: np.ndarray, caused: np.ndarray | float) -> None:
        self._every += table
        if self._counts:
            self._counted += table
            self._caused += caused
        self._counts = True

    def read(self) -> list[StepTotals]:
        """Returns each worker's totals so far."""
        return [
            StepTotals(every, counted, self._caused.copy())
            for every, counted in zip(self._every.copy(), self._counted.copy(), strict=True)
        ]
