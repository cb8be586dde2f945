"""Clock on the chief for the time that each worker takes for its share of a batch."""

from collections.abc import Sequence

import numpy as np


class ShareClock:
    """Sums of the seconds and rows of each worker's shares, over the steps of an epoch.

    The counterpart of `ReplicaClock` on parameter servers. Left out are the first step of an epoch,
    batches that are smaller than others, and steps in which a worker took another one's share.

    Args:
        workers: The number of workers.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self.reset()

    def reset(self) -> None:
        """Clears the sums, and leaves out the next step."""
        self._seconds, self._rows = np.zeros(self._workers), np.zeros(self._workers)
        self._steps, self._largest, self._is_first = 0, 0, True

    def add(self, workers: Sequence[int], rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Adds a step.

        Args:
            workers: The worker that computed each share, in the order of the shares.
            rows: Rows of each share.
            seconds: Seconds that each share took.
        """
        first, self._is_first = self._is_first, False
        own = list(workers) == list(range(self._workers))
        self._largest, total = max(self._largest, sum(rows)), sum(rows)
        if own and not first and all(rows) and total == self._largest:
            self._seconds += seconds
            self._rows += rows
            self._steps += 1

    def read(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns each worker's mean rows and seconds of a step; None if none was counted."""
        return (self._rows / self._steps, self._seconds / self._steps) if self._steps else None
