"""Conversion of Keras's data to local batches of global batches, with a mode per kind of data."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tfdml.collectives.collective import Collective
from tfdml.row_split import OwnShareDataset
from tfdml.strategies.input.device_prefetch import DevicePrefetcher
from tfdml.strategies.input.feed import Feed
from tfdml.strategies.input.feed_modes import ReplicatedFeed, ScatterFeed
from tfdml.strategies.input.input_checks import check_pipeline, draws_without_seed
from tfdml.strategies.input.iterators import open_iterator
from tfdml.strategies.input.local_batch import GlobalBatch, LocalBatch, without_optionals
from tfdml.strategies.input.sharded_input import sharded_batches
from tfdml.strategies.replicas.extended import ReplicaExtended


class SharedAdapter(DataAdapter):
    """Adapter of data that processes share; it calls the original's hooks if this process reads.

    Args:
        adapter: Keras's adapter of this process's data.
        num_batches: Number of global batches, None if unknown.
        reads: Whether this process reads its data.
    """

    def __init__(self, adapter: DataAdapter, num_batches: int | None, reads: bool):
        self._adapter = adapter
        self._num_batches = num_batches
        self._reads = reads

    @property
    def num_batches(self) -> int | None:
        """The number of batches that all processes agreed on, None if unknown."""
        return self._num_batches

    def on_epoch_begin(self) -> None:
        """Forwards the call if this process reads its data."""
        if self._reads:
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Forwards the call if this process reads its data."""
        if self._reads:
            self._adapter.on_epoch_end()


class OneByOne:
    """Iterable of the elements of a dataset of unknown length, read outside of the step's graph.

    If Keras's step reads inside its graph, then at the end of the data it still runs the operations
    that do not need the batch. It counts one iteration too many, which changes Adam's next steps.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self.dataset = dataset

    @property
    def element_spec(self) -> Any:
        """The dataset's element spec."""
        return self.dataset.element_spec

    def __iter__(self) -> Iterator:
        yield from open_iterator(self.dataset)


def batch_spec(data: tf.data.Dataset | Feed | OneByOne | DevicePrefetcher) -> Any:
    """Returns the spec of a replica's batch, with None instead of optionals."""
    spec = data.element_spec
    if isinstance(spec, GlobalBatch):
        spec = spec.rows
    return without_optionals(spec.parts[0] if isinstance(spec, LocalBatch) else spec)


def local_batches(
    adapter: DataAdapter, dataset: tf.data.Dataset, extended: ReplicaExtended, by_steps: bool
) -> tuple[DataAdapter, Iterable]:
    """Returns the adapter and the local batches of global batches that Keras iterates over.

    Args:
        adapter: Keras's adapter of this process's data.
        dataset: The adapter's pipeline; for arrays it already yields local batches.
        extended: The strategy's extension. With one replica there is nothing to split.
        by_steps: Whether an epoch has a fixed number of steps, and may end before the data.
    """
    shared, data = _split(adapter, dataset, extended, by_steps)
    # Not data from Python: batches read ahead are lost if an iterator is dropped. Nor a feed: it
    # must wait for the other processes in the main thread, where the guard sees it.
    repeatable = isinstance(adapter, ArrayDataAdapter | TFDatasetAdapter)
    alone = isinstance(data, tf.data.Dataset | OneByOne)
    # Batches that steps split are not on the devices before.
    whole = extended.batch_split.is_auto
    several = extended._num_replicas_in_sync > 1
    if extended.copies_ahead and several and repeatable and alone and not whole:
        data = DevicePrefetcher(data, extended.local_devices)
    return shared, data


def check_parts_can_change(dataset: Any, extended: ReplicaExtended) -> None:
    """Refuses training data whose parts cannot follow measured times.

    Args:
        dataset: The pipeline of the training data.
        extended: The strategy's extension.

    Raises:
        ValueError: If each process has its own part of the data, and `batch_split` is "auto".
    """
    fixed = isinstance(dataset, tf.data.Dataset) and _reads_own_part(dataset)
    if extended.batch_split.is_auto and fixed and not isinstance(dataset, OwnShareDataset):
        raise ValueError(
            "`batch_split` must not be 'auto' for a dataset with AutoShardPolicy.OFF, because each "
            "process has its own part of the data, which does not change. Received: "
            "batch_split='auto'. Pass numbers, give all processes the whole dataset, or pass "
            "`read_tfrecords(...)` itself, without stages after it."
        )


def check_read_by_all(adapter: DataAdapter, dataset: Any, extended: ReplicaExtended) -> None:
    """Refuses training data that rank 0 would send in every step of training with local updates.

    Args:
        adapter: Keras's adapter of this process's data.
        dataset: The pipeline of the training data.
        extended: The strategy's extension.

    Raises:
        ValueError: If rank 0 alone would read the data.
    """
    collective = extended.collective
    if collective.size == 1 or isinstance(adapter, ArrayDataAdapter):
        return
    if not isinstance(adapter, TFDatasetAdapter):
        received = f"data of {type(adapter).__name__}, which rank 0 sends to the other ranks"
    elif _has_own_order(dataset, collective):
        received = "a dataset that draws different random numbers on each rank, so rank 0 sends it"
    else:
        return
    raise ValueError(
        f"`fit` with `local_updates` must have data that every rank reads itself, because nothing "
        f"is sent between synchronizations. Received on rank {collective.rank}: {received}. Pass "
        f"arrays or a `tf.data` pipeline with seeded shuffles, or one with AutoShardPolicy.OFF, of "
        f"which each rank reads its own part."
    )


def _split(
    adapter: DataAdapter, dataset: tf.data.Dataset, extended: ReplicaExtended, by_steps: bool
) -> tuple[DataAdapter, Iterable]:
    collective = extended.collective
    if isinstance(adapter, ArrayDataAdapter):
        return adapter, dataset
    split = dataset
    if extended._num_replicas_in_sync > 1:
        split = dataset.map(extended.split_element, num_parallel_calls=tf.data.AUTOTUNE)
    if isinstance(adapter, TFDatasetAdapter) and split is not dataset:
        # Not for data from Python: batches read ahead are lost if an iterator is dropped.
        split = split.prefetch(tf.data.AUTOTUNE)
    unknown = dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    if collective.size == 1:
        return adapter, OneByOne(split) if unknown and adapter.num_batches is None else split
    common = {"collective": collective, "splitter": extended.splitter}
    reads = True
    if not isinstance(adapter, TFDatasetAdapter) or _has_own_order(dataset, collective):
        # Keras stops a `PyDataset`'s workers at an epoch's end; reading ahead would use them then.
        stopped = by_steps and getattr(adapter, "enqueuer", None) is not None
        lengths = {"num_batches": adapter.num_batches, "reads_ahead": not stopped}
        feed = ScatterFeed(dataset, **lengths, **common)
        reads = collective.topology.is_chief
    elif _reads_own_part(dataset):
        feed, number = sharded_batches(dataset, **common)
        return SharedAdapter(adapter, number, reads), feed
    else:
        check_pipeline(dataset, collective)
        if not unknown:
            return adapter, split
        feed = ReplicatedFeed(split, num_batches=None, **common)
    return SharedAdapter(adapter, feed.num_batches, reads), feed


def _has_own_order(dataset: tf.data.Dataset, collective: Collective) -> bool:
    """Returns whether any process's pipeline is random in a way that others cannot reproduce."""
    drawn = None if _reads_own_part(dataset) else draws_without_seed(dataset)
    own = tf.constant([int(drawn is not None)])
    if not any(collective.all_gather(own, "unseeded").numpy()):
        return False
    if collective.topology.is_chief:
        warnings.warn(
            f"The dataset draws different random numbers in each process, so rank 0 alone reads it "
            f"and sends every batch to the other ranks. Received: {drawn}. Use `dataset.shuffle(n, "
            f"seed=...)` and stateless random operations with a seed, or call "
            f"`keras.utils.set_random_seed(...)` before the dataset is made: then every rank reads "
            f"for itself.",
            stacklevel=2,
        )
    return True


def _reads_own_part(dataset: tf.data.Dataset) -> bool:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy == tf.data.experimental.AutoShardPolicy.OFF
