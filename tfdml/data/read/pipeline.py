"""Batches for `fit` from sharded TFRecords, from any position of any epoch, for any strategy."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.order import Order
from tfdml.data.read.batch import finisher
from tfdml.data.read.class_balancing import BalancedDataset
from tfdml.data.read.dataset import RecordDataset
from tfdml.data.read.epoch_graph import build_epochs
from tfdml.data.read.fetching import Fetcher
from tfdml.data.read.ledger import Ledger
from tfdml.data.read.mixing import MixedDataset
from tfdml.data.read.parsing import decoder, parser
from tfdml.data.read.position import Position, PositionCallback, from_state, to_state
from tfdml.data.read.read_options import ReadOptions
from tfdml.row_split import LocalReplicas


class TFRecordPipeline(tf.data.Dataset):
    """`tf.data.Dataset` of global batches, whose position is a few numbers.

    The samples of batch k of an epoch depend on the seed and the epoch alone, for any number of
    workers. Each pass over the pipeline is one epoch: a pass that is read to its end moves the
    pipeline to the next epoch; one that is abandoned does not. With
    `callbacks=[pipeline.callback()]` the epoch is that of `fit`, and `state()` returns at any time
    what has been used, however much is read ahead.

    Under a strategy of tfdml with several processes, each process reads, parses and decodes only
    its own rows of every batch. The dataset then has `AutoShardPolicy.OFF`, and the strategy asks
    it for these rows: it is an `OwnShareDataset` (`tfdml.row_split`). Iterated by hand there, it
    yields the process's own rows in groups of `batch_size`, the global size, as everywhere in
    tfdml.

    Use `read_tfrecords`, which documents the arguments.

    Args:
        dataset: Data set to read.
        options: Options for reading.
        worker: This process's replicas, among those that share the batches.
        state: State to resume from, as `state()` returned it; None for the beginning.
        weights: Function that returns the replicas' weights now; each pass keeps those of its
            beginning. None if they do not change.

    Attributes:
        batch_size: Number of rows in a global batch.
        steps_per_epoch: Number of global batches in a whole epoch, the same for all workers.
    """

    def __init__(
        self,
        dataset: RecordDataset | MixedDataset | BalancedDataset,
        options: ReadOptions,
        worker: LocalReplicas,
        state: dict[str, Any] | None,
        weights: Callable[[], tuple[int, ...] | None] | None = None,
    ):
        self._dataset, self._reading, self._worker = dataset, options, worker
        self._weights = weights
        self._lock = threading.Lock()
        self._orders: dict[int, Order] = {}
        batches = options.batches
        self.batch_size = batches.batch_size
        length = len(self._order(0))
        self.steps_per_epoch = batches.steps(length)
        if not self.steps_per_epoch:
            raise ValueError(
                f"`batch_size` must be at most the number of records for end='drop'. Received: "
                f"batch_size={self.batch_size}, of {length} records."
            )
        if not worker.count(self.batch_size):
            raise ValueError(
                f"`batch_size` must be at least the number of processes, because each reads its "
                f"part of every batch. Received: batch_size={self.batch_size} for "
                f"{worker.num_processes} processes."
            )
        # Start of the next pass; start of the pass in use, and the position reached in it.
        self._next = from_state(state, self._recipe())
        self._must_resume = state is not None
        self._began: Position | None = None
        self._position = self._next
        self._ledger = None
        if options.ledger:
            noted = {**self._recipe(), "batch_size": self.batch_size, "end": batches.end}
            self._ledger = Ledger(options.ledger, worker, noted)
        self._fetcher = Fetcher(
            dataset.reader(options.shuffling.window, options.cache),
            batches,
            worker,
            self._order,
            options.shuffling.seed or 0,
            options.skips_corrupt,
            self._ledger,
        )
        schema, names = dataset.manifest.schema, options.features
        self._shares = build_epochs(
            self._begin_pass,
            self._fetcher.fetch,
            self._end_pass,
            parser(schema, names),
            finisher(decoder(schema, names, options.images), options),
        )
        self._inner = self._shares if worker.is_alone else self._grouped()
        super().__init__(self._inner._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._inner]

    @property
    def element_spec(self) -> Any:
        """Structure, shapes and dtypes of a batch."""
        return self._inner.element_spec

    @property
    def skipped(self) -> dict[int, str]:
        """Ids of damaged records that were skipped, each with a description of the damage."""
        return self._fetcher.skipped

    @property
    def records(self) -> int:
        """Number of samples in an epoch."""
        return len(self._order(0))

    def callback(self) -> PositionCallback:
        """Returns a callback that keeps the pipeline at the position of `fit`."""
        return PositionCallback(self)

    def state(self) -> dict[str, Any]:
        """Returns the position, less than 1 KB of JSON, for `read_tfrecords(state=...)`.

        It is the position that the callback has counted; without the callback, the beginning of the
        epoch that the next pass reads. After an epoch's last batch it is the next epoch's start.
        """
        position = self._reached
        if -(-position.sample // self.batch_size) >= self.steps_per_epoch:
            position = Position(position.epoch + 1)
        return to_state(position, self._recipe())

    def state_in_epoch(self) -> dict[str, Any]:
        """Returns the position in the epoch that `fit` trains, also after its last batch.

        A checkpoint there resumes in that epoch, of which only the end is left: its callbacks.
        """
        return to_state(self._reached, self._recipe())

    @property
    def _reached(self) -> Position:
        return self._position if self._began else self._next

    def restore(self, state: dict[str, Any]) -> None:
        """Makes the next pass resume from a state, as `read_tfrecords(state=...)` does.

        Raises:
            ValueError: If `state` is of other data or another order.
        """
        self._next = self._position = from_state(state, self._recipe())
        self._must_resume = True
        self._began = None

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Returns the state after `step` batches of a whole epoch."""
        return to_state(Position(epoch, step * self.batch_size), self._recipe())

    def begin_epoch(self, epoch: int) -> None:
        """Makes the next pass read an epoch: from the resumed position, or from its beginning.

        Raises:
            ValueError: If the pipeline was made to resume in another epoch.
        """
        if self._must_resume and self._next.epoch != epoch:
            raise ValueError(
                f"`initial_epoch` of `fit` must be the epoch of the `state` that was given to the "
                f"data. Received: initial_epoch={epoch} and a state of epoch {self._next.epoch}. "
                f"Pass initial_epoch={self._next.epoch} to `fit`, or leave `state` out to read "
                f"from the beginning."
            )
        self._must_resume = False
        if self._next.epoch != epoch:
            self._next = Position(epoch)
        self._began = self._position = self._next

    def used(self, batches: int) -> None:
        """Reports how many batches have been used since the epoch was begun."""
        began, size = self._began, self.batch_size
        if self._ledger:
            before = -(-(self._position.sample - began.sample) // size)
            self._ledger.used(began, before, batches, size)
        sample = min(began.sample + batches * size, len(self._order(began.epoch)))
        self._position = Position(began.epoch, sample)

    def ids(self, epoch: int, step: int) -> np.ndarray:
        """Returns the ids of the samples of a global batch, in the order of its rows: int64.

        Args:
            epoch: Number of the epoch.
            step: Number of the batch, from 0.
        """
        return self._reading.batches.rows(self._order(epoch), 0, step, LocalReplicas()).ids

    def _recipe(self) -> dict[str, Any]:
        """Returns the data and options that determine the order."""
        shuffling = self._reading.shuffling
        return {
            "data": self._dataset.digest,
            "records": len(self._order(0)),
            "seed": shuffling.seed,
            "window": shuffling.window if shuffling.seed is not None else 0,
            "shards_at_once": shuffling.shards_at_once,
            "reshuffle": shuffling.reshuffle,
            "bucket": shuffling.bucket,
            "keep_shards": shuffling.keep_shards,
        }

    def _order(self, epoch: int) -> Order:
        with self._lock:
            if epoch not in self._orders:
                self._orders = dict(list(self._orders.items())[-1:])
                self._orders[epoch] = self._dataset.order(self._reading.shuffling, epoch)
            return self._orders[epoch]

    def _grouped(self) -> tf.data.Dataset:
        """Returns this process's own rows in groups of the global batch size."""
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        return self._shares.rebatch(self.batch_size).with_options(options)

    def cardinality(self) -> tf.Tensor:
        """Returns the number of global batches in a whole epoch, even if a pass begins in one."""
        return tf.constant(self.steps_per_epoch, tf.int64)

    @property
    def global_batch_size(self) -> int | None:
        """Number of rows in a global batch; None if this process reads all of them."""
        return None if self._worker.is_alone else self.batch_size

    def local_shares(self, replicas: LocalReplicas) -> tuple[tf.data.Dataset, int | None]:
        """Returns a process's rows of each global batch; see `OwnShareDataset`."""
        if replicas.rows(self.batch_size) == self._worker_now().rows(self.batch_size):
            return self._shares, self.steps_per_epoch
        return self.rebatch(replicas.count(self.batch_size)), None

    def _begin_pass(self) -> np.ndarray:
        """Begins a pass; see `build_epochs`."""
        epoch, first = self._next.epoch, self._next.sample
        self._worker = self._worker_now()
        self._fetcher.begin_pass(self._worker)
        remaining = len(self._order(epoch)) - first
        steps = self._reading.batches.own_steps(remaining, self._worker)
        if not steps:
            self._end_pass(epoch)
        own = self._worker.count(self.batch_size)
        return np.array([epoch, first, steps, self._fetcher.spans.count(steps), own], np.int64)

    def _worker_now(self) -> LocalReplicas:
        """Returns this process's replicas with the weights of now."""
        weights = self._weights() if self._weights else self._worker.weights
        fits = weights is None or len(weights) == self._worker.num_replicas
        return dataclasses.replace(self._worker, weights=weights) if fits else self._worker

    def _end_pass(self, epoch: int) -> None:
        if self._next.epoch == epoch:
            self._next = Position(epoch + 1)
