"""Feeds: local batches of global batches from data that processes read separately and agree on."""

import abc
import collections
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.errors import DataError, OtherRankError
from tfdml.strategies.input.iterators import open_iterator
from tfdml.strategies.input.local_batch import BatchSplitter, LocalBatch, count_rows

# A process announces the size of each of its batches, or one of these.
ENDED, FAILED = 0, -1

# Maximum number of batches agreed on at once. The first is agreed on alone, then 2, then 4, ...
_AT_ONCE = 8

# Number of iterations of a job, the same on all processes: exchanges still under way when the next
# iteration begins must not be confused with those of the next. Names are reused cyclically, because
# each name used is remembered.
_iterations: dict[tuple[int, int], Iterator[int]] = collections.defaultdict(itertools.count)
_NAMES = 8


class Feed(abc.ABC):
    """Iterable of this process's local batches; all processes yield the same number of them.

    Args:
        dataset: This process's pipeline.
        collective: Collective by which the processes agree.
        splitter: Splitter of global batches over the replicas.
        num_batches: Number of batches of this process's pipeline, None if unknown.
        reads_ahead: Whether batches may be read before they are requested. False on any process
            holds for all.

    Attributes:
        num_batches: Number of local batches that all processes yield, None if unknown.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        collective: Collective,
        splitter: BatchSplitter,
        num_batches: int | None,
        reads_ahead: bool = True,
    ):
        self.dataset = dataset
        self._collective = collective
        self._splitter = splitter
        own = [-1 if num_batches is None else num_batches, int(reads_ahead)]
        known, ahead = self._announce(own, "feed/length")
        self._reads_ahead = all(ahead)
        self.num_batches = self._agree_on_length(known)

    @property
    def element_spec(self) -> Any:
        """The pipeline's element spec: of batches, or of local batches of them."""
        return self.dataset.element_spec

    def __iter__(self) -> Iterator[LocalBatch]:
        """Yields this process's local batches of the global batches.

        If batches may be read ahead, a thread reads the next ones and agrees on them with the other
        processes while steps run. Batches already read are lost if the iteration is dropped.

        Raises:
            OtherRankError: If another process's data raised an error.
            RuntimeError: If another process's data ended too early.
            DataError: If this process's own data raised an error.
        """
        batches = self._open()
        rank_and_size = self._collective.rank, self._collective.size
        name = f"feed_{next(_iterations[rank_and_size]) % _NAMES}"
        number, count = 0, 1
        # Leaving the block waits for the pending exchange, which the other processes wait for, too.
        with ThreadPoolExecutor(1, "tfdml-feed") as reader:
            coming = reader.submit(self._next, batches, number, count, name)
            while True:
                with self._collective.waiting(f"batch {number} of the data"):
                    local_batches, error = coming.result()
                number += len(local_batches)
                ended = len(local_batches) < count
                if not self._reads_ahead:
                    yield from local_batches
                    local_batches = []
                if not ended:
                    count = min(2 * count, _AT_ONCE) if self._reads_ahead else 1
                    coming = reader.submit(self._next, batches, number, count, name)
                yield from local_batches
                if error is not None:
                    raise error
                if ended:
                    return

    def _next(
        self, batches: Iterator, first: int, count: int, name: str
    ) -> tuple[list[LocalBatch], Exception | None]:
        """Reads this process's local batches of the next global batches.

        Args:
            batches: This process's batches.
            first: Number of the first batch.
            count: Number of batches to read; fewer are read at the end of the data.
            name: Prefix of the exchanges' names, before a `/`.

        Returns:
            The local batches, and the error that follows them, or None.
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
        return self._local_batches(own[: len(agreed)], agreed, name), error

    def _announce(self, values: Sequence[int], name: str) -> list[list[int]]:
        """Gathers numbers from all processes; returns, for each number, its values by rank."""
        own = tf.constant([values], tf.int64)
        return self._collective.concurrent_with_steps.all_gather(own, name).numpy().T.tolist()

    def _open(self) -> Iterator:
        return open_iterator(self.dataset)

    def _count(self, batch: Any) -> int:
        return int(count_rows(batch))

    def _own_error(self, error: Exception, number: int) -> DataError:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        data_error = DataError(
            f"The data must not fail on any rank. Received on rank {self._collective.rank}, "
            f"instead of batch {number}: {reason}"
        )
        data_error.__cause__ = error
        return data_error

    def _problem(self, rows: Sequence[int], number: int) -> RuntimeError | None:
        """Returns an error if the processes' announcements are inconsistent, else None."""
        if FAILED not in rows:
            return None
        return OtherRankError(
            f"The data must not fail on any rank. Received: an error on rank "
            f"{rows.index(FAILED)} instead of batch {number}, so rank "
            f"{self._collective.rank} ends too. See the error message of rank {rows.index(FAILED)}."
        )

    @abc.abstractmethod
    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        """Returns the number of local batches from the processes' numbers (-1: unknown)."""

    @abc.abstractmethod
    def _local_batches(
        self, batches: Sequence[Any], rows: Sequence[Sequence[int]], name: str
    ) -> list[LocalBatch]:
        """Returns this process's local batches from its own batches and all processes' row counts.

        Args:
            batches: Batches from its pipeline; None after it has ended before the others'.
            rows: Announcements of all processes for each batch, by rank.
            name: Prefix of the exchanges' names, before a `/`.
        """
