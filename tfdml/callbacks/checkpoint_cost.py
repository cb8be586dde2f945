"""What saving costs a training, measured while it runs; and how often it should save."""

import collections
import math
import statistics
import time
from collections.abc import Callable

# The part of a training's time that saves may cost.
LIMIT = 0.035
# Saves and steps without a write beside them until there is something to say. The first save is
# not counted: much is done for the first time then.
_SAVES, _STEPS = 3, 5


class SaveCost:
    """Measures saves and steps, and advises once, when it has seen enough of both.

    A save costs the time for which training stands still, and the time by which steps are slower
    while it is written.

    Args:
        clock: Returns seconds.

    Reference:
        Mohan et al., CheckFreq: Frequent, Fine-Grained DNN Checkpointing, FAST 2021: the interval
        is chosen from what was measured, for a cost of 3.5 % at most.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._before: float | None = None
        self._still: list[float] = []
        self._writes: list[float] = []
        self._saved_at: list[float] = []
        self._steps: dict[bool, collections.deque[float]] = {
            beside_a_write: collections.deque(maxlen=1000) for beside_a_write in (False, True)
        }
        self._was_busy = self._told = False

    def pause(self) -> None:
        """Something else than steps comes now: what lies between two epochs."""
        self._before = None

    def step(self, steps: int, busy: bool) -> None:
        """Steps have been trained.

        Args:
            steps: Their number.
            busy: Whether something is being written.
        """
        now = self._clock()
        if self._before is not None and self._saved_at:
            seconds = (now - self._before) / steps
            self._steps[busy or self._was_busy].append(seconds)
        self._before, self._was_busy = now, busy

    def saved(self, began: float, write_seconds: float) -> None:
        """A save has been begun, or done.

        Args:
            began: The clock's time before it.
            write_seconds: What the write before it took, from its beginning to its end.
        """
        now = self._clock()
        self._saved_at.append(began)
        if len(self._saved_at) > 1:
            self._still.append(now - began)
            self._writes.append(write_seconds)
        if self._before is not None:
            self._before, self._was_busy = now, True

    def advice(self) -> str | None:
        """Returns a sentence, once; None before there is enough to go by."""
        idle, beside = self._steps[False], self._steps[True]
        if self._told or len(self._still) < _SAVES or len(idle) < _STEPS:
            return None
        self._told = True
        step = statistics.median(idle)
        slower = max(0.0, sum(beside) - step * len(beside)) / len(self._saved_at)
        still = statistics.median(self._still)
        cost = still + slower
        # A save that comes while the one before is written waits for it.
        apart = max(cost / LIMIT, statistics.median(self._writes))
        now = (self._saved_at[-1] - self._saved_at[0]) / (len(self._saved_at) - 1)
        return (
            f"checkpoints take {100 * cost / now:.2g} % of training time: {cost:.2g} s a save "
            f"({still:.2g} s of standstill, {slower:.2g} s of slower steps during the write). At "
            f"one save every {apart:.3g} s or {math.ceil(apart / step)} steps it is below "
            f"{100 * LIMIT:.1f} %."
        )
