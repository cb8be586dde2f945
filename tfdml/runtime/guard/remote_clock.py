"""Difference between a rank's clock and rank 0's, from round trips over the guard's channel."""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from tfdml.runtime import host_clock

# The fastest of so many round trips counts: it had the least time to be delayed one way alone.
_ROUND_TRIPS = 16
# Seconds after which an answer is given up, so that a lost rank does not hold up this one.
_ANSWER_SECONDS = 5.0


class ClockReading(NamedTuple):
    """Difference between two clocks, measured once.

    Attributes:
        at: Time of the measurement on this rank's clock, in seconds.
        offset: Seconds to add to this rank's times for those of rank 0's clock.
        error: Largest error of `offset` in seconds: half of the round trip.
    """

    at: float
    offset: float
    error: float


class RemoteClock:
    """Rank 0's clock as another rank reads it.

    A question and its answer take a round trip. Rank 0 read its clock at some time during it, so
    the middle of the round trip is wrong by half of it at most, however unequal the two ways are
    and however busy the ranks.

    Reference:
        Mills, Internet time synchronization: the Network Time Protocol, IEEE Transactions on
        Communications 39 (10), 1991.

    Args:
        send: Function that sends a message to rank 0, and returns False if it cannot.
    """

    def __init__(self, send: Callable[[dict], bool]):
        self._send = send
        self._answers: queue.Queue[tuple[float, float, float]] = queue.Queue()
        self._asking = threading.Lock()

    def read(self) -> ClockReading | None:
        """Returns the difference between the clocks; None if rank 0 does not answer."""
        readings = []
        with self._asking:
            while not self._answers.empty():  # Late answers to an earlier call.
                self._answers.get_nowait()
            for _ in range(_ROUND_TRIPS):
                if not self._send({"kind": "clock", "asked": host_clock.now()}):
                    break
                try:
                    asked, answered, heard = self._answers.get(timeout=_ANSWER_SECONDS)
                except queue.Empty:
                    break
                middle, half = (asked + heard) / 2, (heard - asked) / 2
                readings.append(ClockReading(middle, answered - middle, half))
        return min(readings, key=lambda reading: reading.error, default=None)

    def hear(self, message: dict) -> None:
        """Takes rank 0's answer; called by the thread that receives, as soon as it has arrived."""
        heard = host_clock.now()
        self._answers.put((float(message["asked"]), float(message["answered"]), heard))


def answer(message: dict) -> dict:
    """Returns rank 0's answer to a question for its clock.

    Args:
        message: The question.
    """
    return {"kind": "clock", "asked": message["asked"], "answered": host_clock.now()}
