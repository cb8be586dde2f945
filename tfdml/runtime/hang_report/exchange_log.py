"""Record of the exchanges that this process has begun and done."""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdml.runtime.hang_report import graph_events

# Exchanges that are kept.
KEPT = 200
# Events among which these are: two for each, and some of exchanges that began before.
_EVENTS = 3 * KEPT


@dataclasses.dataclass
class Exchange:
    """One exchange of this process.

    Ranks pair an exchange by its name and turn: the third of a name here belongs to the third of
    that name on each other rank, whatever else they exchange in between.

    Attributes:
        name: Operation and step, such as "train_step/bucket_0 (all_reduce)".
        turn: Number of exchanges of that name begun so far, this one included.
        begun: Time at which it began, in seconds since the epoch.
        done: Time at which it ended; None before.
        failed: Whether it ended with an exception.
    """

    name: str
    turn: int
    begun: float
    done: float | None = None
    failed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self.done is None and not self.failed


class ExchangeLog:
    """The last exchanges of this process, those of graphs included.

    Graphs note theirs as they run, by `graph_events`; `collect` takes them. Event 2n is the begin
    of the exchange with the n-th name, event 2n + 1 its end; the time of an end by an exception is
    negative. They are kept as arrays, and made into exchanges only where somebody reads them. Any
    thread may call these methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        # The last events, in parts: their numbers and times.
        self._parts: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()
        self._count = 0
        # Of the events before: how often each name has begun, and since when it has not ended.
        self._turns: collections.Counter[int] = collections.Counter()
        self._open: dict[int, float] = {}

    # -- Notes ---------------------------------------------------------------------------------

    def note_in_graph(
        self, name: str, tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]
    ) -> None:
        """Has the graph being traced note each time that an exchange begins and ends.

        It begins once its tensors exist, and has ended once its first result exists. Nothing waits
        for the notes.

        Args:
            name: Name of the exchange.
            tensors: Tensors that it sends.
            results: Tensors that it returns.
        """
        begin = 2 * self._number(name)
        begun = graph_events.stage_event(begin, tensors)
        if begun is not None:
            graph_events.stage_event(begin + 1, [begun, *results[:1]])

    @contextlib.contextmanager
    def eager(self, name: str) -> Iterator[None]:
        """Context manager: the main thread is in an exchange outside of graphs.

        Args:
            name: Name of the exchange.
        """
        self.collect()  # What graphs have noted comes before.
        begin = 2 * self._number(name)
        self._add(np.array([begin]), np.array([time.time()]))
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            end = time.time() if succeeded else -time.time()
            self._add(np.array([begin + 1]), np.array([end]))

    def _number(self, name: str) -> int:
        with self._lock:
            if name not in self._numbers:
                self._numbers[name] = len(self._names)
                self._names.append(name)
            return self._numbers[name]

    def _add(self, numbers: np.ndarray, times: np.ndarray) -> None:
        # Events of exchanges at the same time are noted in any order.
        order = np.argsort(np.abs(times), kind="stable")
        with self._lock:
            self._parts.append((numbers[order], times[order]))
            self._count += len(numbers)
            while self._count - len(self._parts[0][0]) >= _EVENTS:
                self._forget(*self._parts.popleft())

    def _forget(self, numbers: np.ndarray, times: np.ndarray) -> None:
        """Keeps of the oldest events how often each name has begun, and which has not ended."""
        self._count -= len(numbers)
        names, begins = numbers // 2, numbers % 2 == 0
        for name, count in zip(*np.unique(names[begins], return_counts=True), strict=True):
            self._turns[int(name)] += int(count)
        # The last event of each name is the first one from behind.
        for name, place in zip(*np.unique(names[::-1], return_index=True), strict=True):
            self._open.pop(int(name), None)
            if begins[::-1][place]:
                self._open[int(name)] = float(times[::-1][place])

    # -- Reading -------------------------------------------------------------------------------

    def collect(self, at_least: int = 1) -> None:
        """Takes what graphs have noted.

        Args:
            at_least: Number of events below which they are left for later.
        """
        with self._collecting:
            count = graph_events.count_events()
            if count >= at_least:
                self._add(*graph_events.take_events(count))

    def read(self) -> tuple[list[Exchange], dict[str, int]]:
        """Returns the last exchanges in the order begun, and the number begun of each name.

        An exchange that has not ended is among them, however many have begun since.
        """
        with self._lock:
            parts, turns, names = list(self._parts), self._turns.copy(), list(self._names)
            open_ = {n: Exchange(names[n], turns[n], begun) for n, begun in self._open.items()}
        found = list(open_.values())
        for numbers, times in parts:
            for number, when in zip(numbers.tolist(), times.tolist(), strict=True):
                name, is_end = divmod(number, 2)
                before = open_.pop(name, None)
                if is_end and before is not None:
                    before.failed = when < 0
                    before.done = None if before.failed else when
                elif not is_end:
                    turns[name] += 1
                    open_[name] = Exchange(names[name], turns[name], when)
                    found.append(open_[name])
                    if before is not None:
                        before.failed = True  # A name is in flight only once.
        older = [exchange for exchange in found[:-KEPT] if exchange.is_open]
        return [*older, *found[-KEPT:]], {names[n]: count for n, count in turns.items()}


# Of this process: the events of its graphs are in one buffer.
EXCHANGE_LOG = ExchangeLog()
