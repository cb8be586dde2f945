"""Cost of checkpoints, measured during training, and advice on how often to save."""

import collections
import math
import statistics
import time
from collections.abc import Callable

# Fraction of the training time that saves may cost.
LIMIT = 0.035
# Saves, and steps without a concurrent write, that the advice needs. The first save is not counted:
# it includes one-time work.
_SAVES, _STEPS = 3, 5


class SaveCost:
    """Measures saves and steps, and gives advice once, when it has measured enough of both.

    The cost of a save is the time for which training stops, plus the time by which steps are slower
    while it is written.

    Args:
        clock: Function that returns the time in seconds.

    Reference:
        Mohan et al., CheckFreq: Frequent, Fine-Grained DNN Checkpointing, FAST 2021: the interval
        is chosen from measurements, for a cost of at most 3.5 %.
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
        self._was_busy = self._advised = False

    def pause(self) -> None:
        """Excludes the time until the next step, as between two epochs."""
        self._before = None

    def step(self, steps: int, busy: bool) -> None:
        """Records trained steps.

        Args:
            steps: The number of steps.
            busy: Whether a checkpoint is being written.
        """
        now = self._clock()
        if self._before is not None and self._saved_at:
            seconds = (now - self._before) / steps
            self._steps[busy or self._was_busy].append(seconds)
        self._before, self._was_busy = now, busy

    def saved(self, began: float, write_seconds: float) -> None:
        """Records a save that has begun, or is done.

        Args:
            began: Time of the clock before the save.
            write_seconds: Seconds that the previous write took, from its beginning to its end.
        """
        now = self._clock()
        self._saved_at.append(began)
        if len(self._saved_at) > 1:
            self._still.append(now - began)
            self._writes.append(write_seconds)
        if self._before is not None:
            self._before, self._was_busy = now, True

    def advice(self) -> str | None:
        """Returns the advice once; None before there are enough measurements."""
        idle, beside = self._steps[False], self._steps[True]
        if self._advised or len(self._still) < _SAVES or len(idle) < _STEPS:
            return None
        self._advised = True
        step = statistics.median(idle)
        slower = max(0.0, sum(beside) - step * len(beside)) / len(self._saved_at)
        still = statistics.median(self._still)
        cost = still + slower
        # Saves must not be closer than a write takes, because a save waits for the previous write.
        apart = max(cost / LIMIT, statistics.median(self._writes))
        now = (self._saved_at[-1] - self._saved_at[0]) / (len(self._saved_at) - 1)
        return (
            f"checkpoints take {100 * cost / now:.2g} % of training time: {cost:.2g} s "
            f"per save ({still:.2g} s with training paused, {slower:.2g} s of slower steps during "
            f"the write). One save every {apart:.3g} s or {math.ceil(apart / step)} steps takes "
            f"less than {100 * LIMIT:.1f} %."
        )
