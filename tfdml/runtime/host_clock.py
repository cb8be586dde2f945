"""The clock of this host, from which the times of a timeline are read."""

import time

import tensorflow as tf

# Seconds by which the clock is set forward. Hosts' clocks differ; ranks of one host share theirs,
# so tests of what aligns clocks give each rank a shift of its own.
_shift = 0.0


def set_shift(seconds: float) -> None:
    """Sets this process's clock forward; graphs that were traced before keep their clock.

    Args:
        seconds: Seconds from the host's time to this process's; 0 for none.
    """
    global _shift
    _shift = seconds


def now() -> float:
    """Returns the present time in seconds since 1970, on this host's clock."""
    return time.time() + _shift


def now_in_step() -> tf.Tensor:
    """Returns the time at which a step's graph gets here, on the same clock: float64, `[]`."""
    return tf.timestamp() + _shift
