"""Batches for `fit` out of sharded TFRecords, from any place of any epoch on, for any strategy."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data import order as orders
from tfdml.data.balancing import BalancedDataset
from tfdml.data.batch import finisher
from tfdml.data.dataset import RecordDataset, Shuffling
from tfdml.data.framing import BadRecord
from tfdml.data.ledger import Ledger
from tfdml.data.mixing import MixedDataset
from tfdml.data.order import Order
from tfdml.data.parsing import ImageDecoding, parser
from tfdml.data.position import Position, PositionCallback, from_state, to_state
from tfdml.data.sharding import Batches, Rows, Worker

# Batches of records that are read ahead of parsing.
AHEAD = 4


class TFRecordPipeline(tf.data.Dataset):
    """A `tf.data.Dataset` of global batches, whose place is a few numbers.

    Which samples batch k of an epoch holds follows from the seed and the epoch alone, for any
    number of workers. Each pass over the pipeline is one epoch: a pass that has been read to its
    end moves the pipeline on to the next epoch; one that is given up does not. With
    `callbacks=[pipeline.callback()]` the epoch is that of `fit`, and `state()` says at any time
    what has been used, however much is read ahead.

    Under a strategy of tfdml with several processes each process reads, parses and decodes its own
    rows of every batch only. The dataset then has `AutoShardPolicy.OFF`, so the strategy takes
    what a process yields as that process's part of the global batch, and its `batch` is the global
    size, as everywhere in tfdml: iterated by hand there, it yields the process's own rows, in
    groups of `batch_size`.

    Use `read_tfrecords`, which documents the arguments.

    Attributes:
        batch_size: The rows of a global batch.
        steps_per_epoch: The global batches of a whole epoch, the same for all workers.
        skipped: The ids of damaged records that were skipped, each with what is wrong with it.
    """

    def __init__(
        self,
        dataset: RecordDataset | MixedDataset | BalancedDataset,
        schema_names: Sequence[str],
        label: str | None,
        batches: Batches,
        shuffling: Shuffling,
        worker: Worker,
        images: ImageDecoding,
        transform: Callable | None,
        augment: Callable | None,
        on_corrupt: str,
        state: dict[str, Any] | None,
        ledger: str | None,
    ):
        self._dataset, self._batches, self._shuffling = dataset, batches, shuffling
        self._worker, self._on_corrupt = worker, on_corrupt
        self._reader = dataset.reader(shuffling.window)
        self._lock = threading.Lock()
        self._orders: dict[int, Order] = {}
        self._planned: dict[tuple[int, int, int], Rows] = {}
        self._spare: bytes | None = None
        self.skipped: dict[int, str] = {}
        self.batch_size = batches.batch_size
        length = len(self._order(0))
        self.steps_per_epoch = batches.steps(length)
        if not self.steps_per_epoch:
            raise ValueError(
                f"`batch_size` must be at most the number of records for end='drop'. Received: "
                f"batch_size={batches.batch_size}, of {length} records."
            )
        own = worker.rows(batches.batch_size)
        if own.start == own.stop:
            raise ValueError(
                f"`batch_size` must be at least the number of processes, because each reads its "
                f"part of every batch. Received: batch_size={batches.batch_size} for "
                f"{worker.num_replicas // worker.local_replicas} processes."
            )
        # Where the next pass begins; where the one that is used began, and what of it is used.
        self._next = from_state(state, self._recipe())
        self._began: Position | None = None
        self._position = self._next
        self._ledger = (
            Ledger(
                ledger,
                worker,
                {**self._recipe(), "batch_size": self.batch_size, "end": batches.end},
            )
            if ledger
            else None
        )
        parse = parser(dataset.manifest.schema, list(schema_names), images)
        self._finish = finisher(
            parse, list(schema_names), label, transform, augment, self._weighted
        )
        self._shares = self._passes()
        self._inner = self._declared()
        super().__init__(self._inner._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._inner]

    @property
    def element_spec(self) -> Any:
        """What a batch is made of."""
        return self._inner.element_spec

    @property
    def records(self) -> int:
        """The places of an epoch's order."""
        return len(self._order(0))

    def callback(self) -> PositionCallback:
        """Returns a callback that keeps the pipeline's position that of `fit`."""
        return PositionCallback(self)

    def state(self) -> dict[str, Any]:
        """Returns the position, less than 1 KB of JSON: what `read_tfrecords(state=...)` takes.

        It is what the callback has counted; without the callback, the beginning of the epoch that
        the next pass reads.
        """
        return to_state(self._position if self._began else self._next, self._recipe())

    def restore(self, state: dict[str, Any]) -> None:
        """Makes the next pass go on from a state, as `read_tfrecords(state=...)` does.

        Raises:
            ValueError: If `state` is of other data or another order.
        """
        self._next = self._position = from_state(state, self._recipe())
        self._began = None

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Returns the state after `step` batches of a whole epoch."""
        return to_state(Position(epoch, step * self.batch_size), self._recipe())

    def begin_epoch(self, epoch: int) -> None:
        """Makes the next pass read an epoch: from where it was resumed, or from its beginning."""
        if self._next.epoch != epoch:
            self._next = Position(epoch)
        self._began = self._position = self._next

    def used(self, batches: int) -> None:
        """Says how many batches of the epoch that was begun have been used since."""
        began, size = self._began, self.batch_size
        if self._ledger:
            before = -(-(self._position.sample - began.sample) // size)
            self._ledger.used(began, before, batches, size)
        sample = min(began.sample + batches * size, len(self._order(began.epoch)))
        self._position = Position(began.epoch, sample)

    def ids(self, epoch: int, step: int) -> np.ndarray:
        """Returns the ids of the samples of a global batch, in the order of its rows: int64.

        Args:
            epoch: The epoch.
            step: The batch, from 0 on.
        """
        return self._batches.rows(self._order(epoch), 0, step, Worker()).ids

    def _recipe(self) -> dict[str, Any]:
        """Returns what the order is made of."""
        shuffling = self._shuffling
        return {
            "data": self._dataset.digest,
            "records": len(self._order(0)),
            "seed": shuffling.seed,
            "window": shuffling.window if shuffling.seed is not None else 0,
            "shards_at_once": shuffling.shards_at_once,
            "reshuffle": shuffling.reshuffle,
            "bucket": shuffling.bucket,
        }

    @property
    def _weighted(self) -> bool:
        return self._batches.end == "pad" or self._on_corrupt == "skip"

    def _order(self, epoch: int) -> Order:
        with self._lock:
            if epoch not in self._orders:
                self._orders = dict(list(self._orders.items())[-1:])
                self._orders[epoch] = self._dataset.order(self._shuffling, epoch)
            return self._orders[epoch]

    def _passes(self) -> tf.data.Dataset:
        """Returns a dataset each pass of which yields this worker's rows of the next epoch."""

        # Python's, called by the graph when it runs.
        def begin(_):
            return self._begin_pass()

        def read(epoch, first, step):
            return self._read(int(epoch), int(first), int(step))

        def end(epoch):
            self._end_pass(int(epoch))
            return np.int64(0)

        @tf.autograph.experimental.do_not_convert
        def one_pass(bounds):
            epoch, first, steps = (bounds[i] for i in range(3))

            @tf.autograph.experimental.do_not_convert
            def records(step):
                values = tf.numpy_function(
                    read, [epoch, first, step], (tf.string, tf.float32, tf.int64)
                )
                shapes = ([None], [None], [None, 2])
                return step, *(tf.ensure_shape(v, s) for v, s in zip(values, shapes, strict=True))

            @tf.autograph.experimental.do_not_convert
            def finish(step, *batch):
                return step, self._finish(*batch)

            @tf.autograph.experimental.do_not_convert
            def mark(step, batch):
                done = tf.cond(
                    tf.equal(step, steps - 1),
                    lambda: tf.numpy_function(end, [epoch], tf.int64),
                    lambda: tf.constant(0, tf.int64),
                )
                with tf.control_dependencies([done]):
                    return tf.nest.map_structure(
                        lambda t: None if t is None else tf.identity(t),
                        batch,
                        expand_composites=True,
                    )

            return (
                tf.data.Dataset.range(steps)
                .map(records)
                .prefetch(AHEAD)
                .map(finish, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
                .prefetch(tf.data.AUTOTUNE)
                # Behind all that reads ahead: the last batch has been taken, so the pass is over.
                .map(mark)
            )

        return (
            tf.data.Dataset.range(1)
            .map(lambda part: tf.ensure_shape(tf.numpy_function(begin, [part], tf.int64), [3]))
            .flat_map(one_pass)
        )

    def _declared(self) -> tf.data.Dataset:
        """Returns what strategies see: it says whether workers read apart, and the global size."""
        if self._worker.is_alone:
            return self._shares
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        # The size is looked for in a `batch` at the end.
        return self._shares.unbatch().batch(self.batch_size).with_options(options)

    def cardinality(self) -> tf.Tensor:
        """Returns the global batches of a whole epoch, also where a pass begins within one."""
        return tf.constant(self.steps_per_epoch, tf.int64)

    def rebatch(self, batch_size: Any, **options: Any) -> tf.data.Dataset:
        """Returns the rows in batches of another size; strategies ask for their share by this."""
        own = self._worker.rows(self.batch_size)
        if not self._worker.is_alone and not options and batch_size == own.stop - own.start:
            return OwnShares(self._shares, self.steps_per_epoch)
        return super().rebatch(batch_size, **options)

    def _begin_pass(self) -> np.ndarray:
        """Returns the epoch, the first sample and the own batches of a pass: int64, `[3]`."""
        epoch, first = self._next.epoch, self._next.sample
        self._planned.clear()
        steps = self._batches.own_steps(len(self._order(epoch)) - first, self._worker)
        if not steps:
            self._end_pass(epoch)
        return np.array([epoch, first, steps], np.int64)

    def _end_pass(self, epoch: int) -> None:
        if self._next.epoch == epoch:
            self._next = Position(epoch + 1)

    def _rows(self, epoch: int, first: int, step: int) -> Rows:
        return self._batches.rows(self._order(epoch), first, step, self._worker)

    def _read(self, epoch: int, first: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the own records of a batch, their weights and their seeds."""
        rows = self._planned.pop((epoch, first, step), None)
        if rows is None:
            rows = self._rows(epoch, first, step)
        ahead = (epoch, first, step + AHEAD)
        if ahead not in self._planned:
            self._planned[ahead] = self._rows(*ahead)
            self._reader.ahead(self._planned[ahead].ids)
        records, weights = self._sound(self._read_sorted(rows.ids), rows)
        seeds = orders.random_numbers(1, self._shuffling.seed or 0, epoch, orders.ROWS)
        seeds = orders.mix(seeds ^ rows.places.astype(np.uint64))
        pairs = np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], 1)
        if self._ledger:
            self._ledger.read(epoch, first + step * self.batch_size, rows.ids[rows.weights > 0])
        return np.array(records, object), weights, pairs.astype(np.int64)

    def _read_sorted(self, ids: np.ndarray) -> list[bytes | BadRecord]:
        """Reads records; those that fill up a batch come after the sorted ones."""
        cut = np.flatnonzero(np.diff(ids) <= 0) + 1
        return [r for part in np.split(ids, cut) for r in self._reader.read(part)]

    def _sound(
        self, records: list[bytes | BadRecord], rows: Rows
    ) -> tuple[list[bytes], np.ndarray]:
        """Returns records without damaged ones, and the rows' weights.

        The row of a damaged record holds another one with weight 0, so all batches keep their size
        and their samples on every worker.

        Raises:
            BadRecord: If a record is damaged and must not be skipped.
        """
        bad = [i for i, record in enumerate(records) if isinstance(record, BadRecord)]
        if self._spare is None:
            self._spare = next((r for r in records if isinstance(r, bytes)), None)
        if not bad:
            return records, rows.weights
        weights = rows.weights.copy()
        for i in bad:
            where = self._reader.where(int(rows.ids[i]))
            if self._on_corrupt != "skip" or self._spare is None:
                raise BadRecord(
                    f"{records[i].reason}. Run `tfdml records verify --repair`, or read with "
                    f"on_corrupt='skip'",
                    where,
                )
            if int(rows.ids[i]) not in self.skipped:
                self.skipped[int(rows.ids[i])] = f"{where}: {records[i].reason}"
                warnings.warn(
                    f"Skipped {where}: {records[i].reason} ({len(self.skipped)} so far).",
                    stacklevel=2,
                )
            records[i], weights[i] = self._spare, 0.0
        return records, weights


class OwnShares(tf.data.Dataset):
    """One worker's rows of each global batch.

    Args:
        shares: A dataset of them.
        steps: The global batches of a whole epoch; a worker may have no rows of the last one.
    """

    def __init__(self, shares: tf.data.Dataset, steps: int):
        self._shares, self._steps = shares, steps
        super().__init__(shares._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._shares]

    @property
    def element_spec(self) -> Any:
        """What a share is made of."""
        return self._shares.element_spec

    def cardinality(self) -> tf.Tensor:
        """Returns the global batches of a whole epoch."""
        return tf.constant(self._steps, tf.int64)
