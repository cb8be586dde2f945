"""Data that processes read apart: portions of global batches, agreed on before each step."""

import abc
import collections
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.errors import DataError, OtherRankError
from tfdml.strategies.iteration import opened
from tfdml.strategies.share import Portion, Splitter, count_rows

# What a process announces of a batch: its size, or one of these.
ENDED, FAILED = 0, -1

# Batches that are agreed on at once, at most. The first is agreed on alone, then 2, then 4, ...
_AT_ONCE = 8

# A job's iterations are counted, alike on all processes: what one has on its way when the next one
# begins must not be taken for the next one's. Names come round again, because each is remembered.
_iterations: dict[tuple[int, int], Iterator[int]] = collections.defaultdict(itertools.count)
_NAMES = 8


class Feed(abc.ABC):
    """An iterable of this process's portions; all processes yield equally many.

    Args:
        dataset: This process's pipeline.
        collective: What the processes agree by.
        splitter: What splits global batches over the replicas.
        num_batches: The number of batches of this process's pipeline, None if unknown.
        reads_ahead: Whether batches may be read before they are asked for, on all processes.

    Attributes:
        num_batches: The number of portions that all processes yield, None if unknown.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        collective: Collective,
        splitter: Splitter,
        num_batches: int | None,
        reads_ahead: bool = True,
    ):
        self._dataset = dataset
        self._collective = collective
        self._splitter = splitter
        own = [-1 if num_batches is None else num_batches, int(reads_ahead)]
        known, ahead = self._announce(own, "feed/length")
        self._reads_ahead = all(ahead)
        self.num_batches = self._agree_on_length(known)

    @property
    def element_spec(self) -> Any:
        """What the pipeline yields: batches, or portions of them."""
        return self._dataset.element_spec

    def __iter__(self) -> Iterator[Portion]:
        """Yields this process's portions of the global batches.

        A thread reads the next batches, and agrees on them with the other processes, while steps
        run, if they may be read ahead. What it has read is lost if the iteration is dropped.

        Raises:
            OtherRankError: If another process's data raised.
            RuntimeError: If another process's data ended too early.
            DataError: If this process's own data raised.
        """
        batches = self._open()
        place = self._collective.rank, self._collective.size
        name = f"feed_{next(_iterations[place]) % _NAMES}"
        number, count = 0, 1
        # Its end waits for what is on its way: the other processes wait for this one's part in it.
        with ThreadPoolExecutor(1, "tfdml-feed") as reader:
            coming = reader.submit(self._next, batches, number, count, name)
            while True:
                with self._collective.waiting(f"batch {number} of the data"):
                    portions, error = coming.result()
                number += len(portions)
                ended = len(portions) < count
                if not self._reads_ahead:
                    yield from portions
                    portions = []
                if not ended:
                    count = min(2 * count, _AT_ONCE) if self._reads_ahead else 1
                    coming = reader.submit(self._next, batches, number, count, name)
                yield from portions
                if error is not None:
                    raise error
                if ended:
                    return

    def _next(
        self, batches: Iterator, first: int, count: int, name: str
    ) -> tuple[list[Portion], Exception | None]:
        """Returns this process's portions of the next global batches.

        Args:
            batches: This process's batches.
            first: The number of the first one.
            count: How many there shall be; fewer at the end of the data.
            name: What the exchanges are called, before a `/`.

        Returns:
            The portions, and what follows them if it is an error.
        """
        own, announced, own_error, error = [], [], None, None
        try:
            for batch in itertools.islice(batches, count):
                announced.append(self._count(batch))
                own.append(batch)
        except Exception as raised:  # noqa: BLE001 (raised again, once all processes know)
            own_error = self._own_error(raised, first + len(own))
            announced.append(FAILED)
        announced += [ENDED] * (count - len(announced))
        agreed = []
        for number, rows in enumerate(self._announce(announced, f"{name}/rows"), first):
            failed_here = rows[self._collective.rank] == FAILED
            error = own_error if failed_here else self._problem(rows, number)
            if error is not None or not any(rows):
                break
            agreed.append(rows)
        own += [None] * (len(agreed) - len(own))
        return self._portions(own[: len(agreed)], agreed, name), error

    def _announce(self, values: Sequence[int], name: str) -> list[list[int]]:
        """Tells all processes some numbers; returns everybody's, for each number by rank."""
        own = tf.constant([values], tf.int64)
        return self._collective.beside_steps.all_gather(own, name).numpy().T.tolist()

    def _open(self) -> Iterator:
        return opened(self._dataset)

    def _count(self, batch: Any) -> int:
        return int(count_rows(batch))

    def _own_error(self, error: Exception, number: int) -> DataError:
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        own = DataError(
            f"The data must not fail on any rank. Received on rank {self._collective.rank}, "
            f"instead of batch {number}: {said}"
        )
        own.__cause__ = error
        return own

    def _problem(self, rows: Sequence[int], number: int) -> RuntimeError | None:
        """Returns why the processes' announcements do not go together, None if they do."""
        if FAILED not in rows:
            return None
        return OtherRankError(
            f"The data must not fail on any rank. Received: an error on rank "
            f"{rows.index(FAILED)} instead of batch {number}, so rank "
            f"{self._collective.rank} ends too. Rank {rows.index(FAILED)} says what it was."
        )

    @abc.abstractmethod
    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        """Returns the number of portions, given the processes' numbers of batches (-1: unknown)."""

    @abc.abstractmethod
    def _portions(
        self, batches: Sequence[Any], rows: Sequence[Sequence[int]], name: str
    ) -> list[Portion]:
        """Returns this process's portions, given its own batches and everybody's rows.

        Args:
            batches: What its pipeline has yielded; None where it has ended before the others'.
            rows: For each batch what each process has announced, by rank.
            name: What the exchanges are called, before a `/`.
        """
