"""Numbering of the replicas, and distribution of global batches to them.

This module and `extended` depend on internals of `tf.distribute` (TensorFlow 2.20, 2.21).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, input_util
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from tfdml.collectives.collective import Collective
from tfdml.strategies.aggregation.accumulation import Accumulator
from tfdml.strategies.batch_split import BatchSplit
from tfdml.strategies.fit_session import FitSession, Kind
from tfdml.strategies.input.device_prefetch import has_accelerators
from tfdml.strategies.input.input_checks import check_pipeline
from tfdml.strategies.input.local_batch import (
    BatchSplitter,
    DeferredSplitter,
    GlobalBatch,
    LocalBatch,
    ShareInfo,
    as_tensors,
    unpacked,
)
from tfdml.strategies.observers.replica_clock import ReplicaClock


class BatchExtended(MirroredExtended):
    """Makes each local device a replica of the job and splits global batches over all replicas.

    Replicas are numbered by process, then by device.

    Args:
        strategy: The strategy that this extends.
        collective: Collective that exchanges tensors with the other processes.
        devices: This process's devices.
        batch_split: Checked `batch_split` of the strategy.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        collective: Collective,
        devices: Sequence[str],
        batch_split: tuple[int, ...] | str | None,
    ):
        self.collective = collective
        # The local replicas' shares in the step being traced or run eagerly, and the model's
        # session if it is a train step.
        self.shares: list[ShareInfo] | None = None
        self.session: FitSession | None = None
        self._global_steps = False
        super().__init__(strategy, devices)
        # Whether rows are copied to the devices while the previous step runs.
        self.copies_ahead = has_accelerators(self._devices)
        self._given_split = batch_split
        self.batch_split: BatchSplit
        self.share_equally()

    # -- Replicas ------------------------------------------------------------------------------

    @property
    def local_devices(self) -> tuple[str, ...]:
        """This process's devices, one per replica."""
        return self._devices

    @property
    def num_local_replicas(self) -> int:
        """The number of replicas of this process."""
        return len(self._devices)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.collective.size * self.num_local_replicas

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.collective.rank * self.num_local_replicas + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group % self.num_local_replicas

    # -- Batches -------------------------------------------------------------------------------

    def share_equally(self) -> None:
        """Starts with the strategy's `batch_split`, for the present number of replicas."""
        self.batch_split = BatchSplit(self._given_split, self._num_replicas_in_sync)

    @property
    def splitter(self) -> BatchSplitter:
        """The splitter of global batches over the replicas, for pipelines."""
        own = self._splitter(self.batch_split.weights)
        if not self.batch_split.is_auto:
            return own
        return DeferredSplitter(**dataclasses.asdict(own), read_weights=self.batch_split.in_step)

    def _splitter(self, weights: Any) -> BatchSplitter:
        first = self._get_replica_id_in_sync_group(0)
        return BatchSplitter(first, self.num_local_replicas, self._num_replicas_in_sync, weights)

    def replica_clock(self, session: FitSession) -> ReplicaClock:
        """Returns the clock of the replicas in a model's train steps; attached on first use."""
        clock = session.observer(ReplicaClock)
        if clock is None:
            own = self._splitter(None)
            clock = ReplicaClock(own.first_replica, own.local_replicas, own.num_replicas)
            session.attach(clock)
        return clock

    def make_local_batch(self, batch: Any) -> LocalBatch:
        """Returns this process's part of a global batch; a `LocalBatch` is returned unchanged."""
        if isinstance(batch, LocalBatch):
            return batch
        with tf.device(self._input_workers_devices[0][0]):
            splitter = self._splitter(self.batch_split.in_step())
            if isinstance(batch, GlobalBatch):
                return splitter.split_whole(batch)
            # `train_on_batch` takes arrays, which an eager step would leave as NumPy arrays.
            return splitter.split(as_tensors(batch))

    def replica_values(self, parts: Sequence[Any]) -> Any:
        """Groups one structure per local replica into a per-replica value for `strategy.run`."""
        return distribute_utils.regroup(tuple(parts))

    def parts_of(self, value: Any) -> list:
        """Returns the parts of a per-replica value, one per local replica."""
        return [distribute_utils.select_replica(i, value) for i in range(self.num_local_replicas)]

    @contextlib.contextmanager
    def working_on(
        self, shares: list[ShareInfo], session: FitSession | None = None
    ) -> Iterator[None]:
        """Context manager: a step works on these shares, which `current_share` returns.

        Args:
            shares: The shares of this process's replicas.
            session: The model's session, in a train step.
        """
        self.shares, self.session = shares, session
        try:
            yield
        finally:
            self.shares = self.session = None

    @property
    def accumulator(self) -> Accumulator | None:
        """The accumulator of the current train step, or None if its model does not accumulate."""
        return self.session.accumulator if self.session is not None else None

    def observer(self, kind: type[Kind]) -> Kind | None:
        """Returns the current train step's observer of a kind, or None."""
        return self.session.observer(kind) if self.session is not None else None

    def current_share(self) -> ShareInfo | None:
        """Returns the calling replica's share; None outside a global step of Keras."""
        replica = tf.distribute.get_replica_context()
        if self.shares is None or replica is None:
            return None
        return self.shares[replica._local_replica_id]

    def split_element(self, *element) -> LocalBatch | GlobalBatch:
        """Returns this process's local batch of a dataset's element, a global batch."""
        return self.splitter.split(unpacked(element))

    @contextlib.contextmanager
    def global_steps(self) -> Iterator[None]:
        """Context manager: datasets are not distributed: a `GlobalStep` takes local batches."""
        before, self._global_steps = self._global_steps, True
        try:
            yield
        finally:
            self._global_steps = before

    def _experimental_distribute_dataset(self, dataset, options):
        """Distributes each replica's rows of every global batch; inside `global_steps`, nothing."""
        if self._global_steps:
            return dataset
        whole = dataset
        check_pipeline(dataset, self.collective)
        if self.collective.size > 1:
            # Equal parts: loops of users take the mean of replicas' means.
            equal = self._splitter(None)
            dataset = dataset.map(
                lambda *batch: equal.own_rows(unpacked(batch)),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
        distributed = input_util.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=self.num_local_replicas,
            options=options,
        )
        distributed._tfdml_original = whole
        return distributed

    def original_dataset(self, data: Any) -> tf.data.Dataset | None:
        """Returns the dataset from which this strategy made a distributed dataset, else None.

        `fit` takes the original, because it splits global batches itself.
        """
        ours = getattr(data, "_strategy", None) is self._container_strategy()
        return getattr(data, "_tfdml_original", None) if ours else None

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options):
        def with_global_context(context: tf.distribute.InputContext) -> tf.data.Dataset:
            del context
            return dataset_fn(
                tf.distribute.InputContext(
                    num_input_pipelines=self.collective.size,
                    input_pipeline_id=self.collective.rank,
                    num_replicas_in_sync=self._num_replicas_in_sync,
                )
            )

        return super()._distribute_datasets_from_function(with_global_context, options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable):
        contexts = [
            tf.distribute.experimental.ValueContext(
                self._get_replica_id_in_sync_group(i), self._num_replicas_in_sync
            )
            for i in range(self.num_local_replicas)
        ]
        return distribute_utils.regroup([value_fn(c) for c in contexts], always_wrap=True)
