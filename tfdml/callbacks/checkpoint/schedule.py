"""Schedule of checkpoints: after each epoch, a number of steps, or an amount of time."""

import datetime
import time
from collections.abc import Callable


class Schedule:
    """Decides after a step whether to save, the same on all ranks.

    The ranks' clocks differ, so rank 0 decides. As ranks must not wait for each other at every
    step, it decides ahead: how many steps to train until it checks its clock again.

    Args:
        save_freq: "epoch", a number of steps, or a time.
        broadcast_json: Function that returns rank 0's argument on all ranks.
        total: The number of steps trained before.

    Raises:
        ValueError: If `save_freq` is something else.
    """

    def __init__(
        self,
        save_freq: str | int | datetime.timedelta,
        broadcast_json: Callable[[dict], dict],
        total: int,
    ):
        self._every = save_freq if isinstance(save_freq, int) else 0
        self._seconds = 0.0
        if isinstance(save_freq, datetime.timedelta):
            self._seconds = save_freq.total_seconds()
        self._broadcast_json = broadcast_json
        self._before = self._looked = total
        self._look_at = total + 1
        self._saved_at = self._looked_at = time.monotonic()

    @staticmethod
    def check(save_freq: str | int | datetime.timedelta) -> None:
        """Validates `save_freq`."""
        if isinstance(save_freq, datetime.timedelta):
            good = save_freq > datetime.timedelta(0)
        else:
            good = save_freq == "epoch" or (type(save_freq) is int and save_freq > 0)
        if not good:
            raise ValueError(
                f'`save_freq` must be "epoch", a positive number of steps or a positive '
                f"`datetime.timedelta`. Received: save_freq={save_freq!r}."
            )

    def due(self, total: int) -> bool:
        """Returns whether to save after `total` steps, of which several may have run at once."""
        before, self._before = self._before, total
        if self._every:
            return total // self._every > before // self._every
        return bool(self._seconds) and total >= self._look_at and self._look(total)

    def _look(self, total: int) -> bool:
        now = time.monotonic()
        rest = self._seconds - (now - self._saved_at)
        per_step = (now - self._looked_at) / max(total - self._looked, 1)
        # Look again after half of the remaining time, because steps may become slower.
        steps = 0 if rest <= 0 else max(1, int(0.5 * rest / max(per_step, 1e-6)))
        steps = self._broadcast_json({"steps": steps})["steps"]
        self._looked, self._looked_at = total, now
        self._look_at = total + max(steps, 1)
        if steps == 0:
            self._saved_at = now
        return steps == 0
