"""Callback by which one rank waits for steps of another."""

import time
from pathlib import Path

import keras

from tests.harness import rank_job

# Seconds that a rank waits at most: a job whose ranks take steps together would wait for good.
_LIMIT = 60.0


class Waiting(keras.callbacks.Callback):
    """A rank waits after its first step until rank 0 has taken some.

    Args:
        for_steps: The number of rank 0's steps.
        directory: Directory of this case alone, by which ranks see what others do.
        waiting_rank: The rank that waits.
    """

    def __init__(self, for_steps: int, directory: str, waiting_rank: int = 1):
        super().__init__()
        self._waiting_rank = waiting_rank
        self._for_steps, self._steps = for_steps, 0
        self._mark = Path(directory, "steps_of_rank_0")
        self.rank, self.has_waited = rank_job.rank(), False

    def on_train_batch_end(self, batch, logs=None):
        """Counts rank 0's steps; the other rank waits."""
        self._steps += 1
        if self.rank == 0 and self._steps == self._for_steps:
            self._mark.touch()
        if self.rank == self._waiting_rank and self._steps == 1:
            end = time.monotonic() + _LIMIT
            while not self._mark.exists():
                if time.monotonic() > end:
                    raise TimeoutError("Rank 0 did not take its steps.")
                time.sleep(0.01)
            self.has_waited = True
