"""Fetches a worker's rows for several batches at once, so that they share the cost of a call."""

import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tfdml.data import order as orders
from tfdml.data.format.framing import BadRecord
from tfdml.data.order import Order
from tfdml.data.read.blocks import BlockReader
from tfdml.data.read.ledger import Ledger
from tfdml.data.read.sharding import Batches, Rows
from tfdml.row_split import LocalReplicas

SPAN_RECORDS = 16_384
SPAN_BYTES = 8 << 20


class Spans(NamedTuple):
    """Groups of batches that are fetched together, small at first so that batch 0 comes soon.

    Attributes:
        batches: Maximum number of batches in a span: a power of two.
    """

    batches: int

    @classmethod
    def for_batches(cls, rows: int, record_bytes: float) -> "Spans":
        """Returns spans for batches of `rows` own rows, with records of `record_bytes` bytes."""
        most = min(SPAN_RECORDS, SPAN_BYTES / max(1.0, record_bytes)) / max(1, rows)
        return cls(1 << max(0, int(most).bit_length() - 1))

    def begin(self, number: int) -> int:
        """Returns the first batch of a span."""
        doubled = min(number, self.batches.bit_length() - 1)
        return (1 << doubled) - 1 + (number - doubled) * self.batches

    def count(self, steps: int) -> int:
        """Returns the number of spans in `steps` batches."""
        doubled = self.batches.bit_length() - 1
        rest = steps - self.begin(doubled)
        return steps.bit_length() if rest <= 0 else doubled - (-rest // self.batches)


class Fetched(NamedTuple):
    """A worker's rows of consecutive batches, one batch after the other.

    Attributes:
        records: Serialised records: array of `bytes` objects, `[rows]`.
        weights: 0 for padding rows and for rows of damaged records, else 1: float32, `[rows]`.
        seeds: Two numbers derived from the seed, the epoch and the sample: int64, `[rows, 2]`.
    """

    records: np.ndarray
    weights: np.ndarray
    seeds: np.ndarray


class Fetcher:
    """Fetches spans, and starts to read the blocks of the next one.

    Args:
        reader: Reader of the records.
        batches: Division of epochs into batches.
        worker: Replicas whose rows are fetched.
        order_of: Function that returns the order of an epoch.
        seed: Seed from which the rows' seeds are derived.
        skips_corrupt: Whether damaged records are skipped; else they are errors.
        ledger: Ledger that notes which samples are read; None for no ledger.

    Attributes:
        spans: Groups of batches that are fetched together.
        skipped: Ids of damaged records that were skipped, each with a description of the damage.
    """

    def __init__(
        self,
        reader: BlockReader,
        batches: Batches,
        worker: LocalReplicas,
        order_of: Callable[[int], Order],
        seed: int,
        skips_corrupt: bool,
        ledger: Ledger | None,
    ):
        self.reader, self._batches = reader, batches
        self._order_of, self._seed = order_of, seed
        self._skips_corrupt, self._ledger = skips_corrupt, ledger
        self.skipped: dict[int, str] = {}
        self._planned: dict[tuple, Rows] = {}
        self._lock = threading.Lock()
        self._spare: bytes | None = None
        self.begin_pass(worker)

    def begin_pass(self, worker: LocalReplicas) -> None:
        """Drops the plans of the previous pass, which may have been abandoned.

        Args:
            worker: Replicas whose rows are fetched in this pass.
        """
        with self._lock:
            self._planned.clear()
            self._worker = worker
            self._own_rows = worker.count(self._batches.batch_size)
            self.spans = Spans.for_batches(self._own_rows, self.reader.record_bytes)

    def fetch(self, epoch: int, first: int, number: int) -> Fetched:
        """Fetches a span.

        Args:
            epoch: Number of the epoch.
            first: Position at which the pass, and so batch 0, begins.
            number: Number of the span.

        Raises:
            BadRecord: If a record is damaged and cannot be skipped. The message has its file,
                record and offset.
        """
        rows = self._plan(epoch, first, number)
        self._plan(epoch, first, number + 1)
        with self._lock:
            self._planned.pop((self._worker, epoch, first, number), None)
        records, damaged = self.reader.read(rows.ids)
        if self._spare is None:
            self._spare = next((r for i, r in enumerate(records) if i not in damaged), None)
        weights = self._without(damaged, rows, records) if damaged else rows.weights
        if self._ledger:
            self._note(epoch, first, number, rows)
        seeds = orders.random_numbers(1, self._seed, epoch, orders.ROWS)
        seeds = orders.mix(seeds ^ rows.positions.astype(np.uint64))
        pairs = np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], 1)
        return Fetched(records, weights, pairs.astype(np.int64))

    def _plan(self, epoch: int, first: int, number: int) -> Rows:
        """Returns the rows of a span, and starts to read their blocks."""
        worker = self._worker
        # With the worker: an abandoned pass may still plan, with other weights.
        key = (worker, epoch, first, number)
        with self._lock:
            if key in self._planned:
                return self._planned[key]
        order = self._order_of(epoch)
        steps = self._batches.own_steps(len(order) - first, worker)
        begin, end = (min(self.spans.begin(n), steps) for n in (number, number + 1))
        rows = self._batches.span(order, first, begin, end, worker)
        self.reader.ahead(rows.ids)
        with self._lock:
            self._planned[key] = rows
        return rows

    def _note(self, epoch: int, first: int, number: int, rows: Rows) -> None:
        for i, begin in enumerate(
            range(0, len(rows.ids), self._own_rows), self.spans.begin(number)
        ):
            own = slice(begin, begin + self._own_rows)
            ids = rows.ids[own][rows.weights[own] > 0]
            self._ledger.read(epoch, first + i * self._batches.batch_size, ids)

    def _without(
        self, damaged: dict[int, BadRecord], rows: Rows, records: np.ndarray
    ) -> np.ndarray:
        """Puts another record into the rows of damaged ones; returns weights that are 0 for them.

        So all batches keep their size and their samples on every worker.
        """
        weights = rows.weights.copy()
        for row, error in damaged.items():
            number = int(rows.ids[row])
            where = self.reader.where(number)
            if not self._skips_corrupt or self._spare is None:
                raise BadRecord(
                    f"{error.reason}. Run `tfdml records verify --repair`, or read with "
                    f"on_corrupt='skip'",
                    where,
                )
            if number not in self.skipped:
                self.skipped[number] = f"{where}: {error.reason}"
                warnings.warn(
                    f"Skipped {where}: {error.reason} ({len(self.skipped)} so far).",
                    stacklevel=2,
                )
            records[row], weights[row] = self._spare, 0.0
        return weights
