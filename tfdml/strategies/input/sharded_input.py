"""Local batches under `AutoShardPolicy.OFF`: each process reads its part of each global batch."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.row_split import OwnShareDataset
from tfdml.strategies.input.feed_modes import ShardedFeed
from tfdml.strategies.input.local_batch import (
    BatchSplitter,
    LocalBatch,
    count_rows,
    take_rows,
    unpacked,
)

# A process announces its number of rows, or one of these.
UNKNOWN, ENDLESS = -1, -2

# Stages at the end of a pipeline that yield their input batches unchanged.
_PASSING_ON = {"_PrefetchDataset", "CacheDataset", "_OptionsDataset"}
_BATCHING = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset"}
# Other stages whose batches have the size of their input batches.
_CHOOSING = {
    "_AssertCardinalityDataset",
    "_ConcatenateDataset",
    "_FilterDataset",
    "_RepeatDataset",
    "_ShardDataset",
    "_ShuffleDataset",
    "_SkipDataset",
    "_TakeDataset",
    "_ZipDataset",
}


def sharded_batches(
    dataset: tf.data.Dataset, collective: Collective, splitter: BatchSplitter
) -> tuple[tf.data.Dataset | ShardedFeed, int | None]:
    """Returns a process's local batches of global batches, and their number, None if unknown.

    If all processes know their number of rows and need the same number of batches for them, the
    processes do not have to agree before each step.

    Args:
        dataset: The process's part of the data, batched by the global batch size.
        collective: Collective by which the processes agree.
        splitter: Splitter of global batches over the replicas.

    Raises:
        ValueError: If the batch size is unknown, or smaller than the number of processes.
    """
    batch_size = _batch_size(dataset, splitter)
    own = splitter.count(batch_size)
    rows = known_rows(dataset)
    announced = tf.constant([[rows, own]], tf.int64)
    everybody = collective.all_gather(announced, "sharded_input").numpy().tolist()
    tail = _last_batch(everybody)
    if tail is None:
        shares, length = local_shares(dataset, splitter)
        length = _ceil(rows, own) if rows >= 0 else length
        feed = ShardedFeed(shares, collective, splitter, length)
        return feed, feed.num_batches
    number, last = tail
    full = [of_process for _, of_process in everybody]
    numbered = dataset.rebatch(own).enumerate()
    local_batches = numbered.map(
        _with_known_counts(full, last, number, collective.rank, splitter),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return local_batches.prefetch(tf.data.AUTOTUNE), number


def local_shares(
    dataset: tf.data.Dataset, splitter: BatchSplitter
) -> tuple[tf.data.Dataset, int | None]:
    """Returns a process's part of the data in batches the size of its share of a global batch.

    Their `global_rows` count only this process's rows; `ShardedFeed` sums over the processes.

    Args:
        dataset: The process's part of the data, batched by the global batch size.
        splitter: Splitter of global batches over the replicas.

    Returns:
        The local batches, and their number, None if unknown.

    Raises:
        ValueError: If the batch size is unknown, or smaller than the number of processes.
    """
    batch_size = _batch_size(dataset, splitter)
    if isinstance(dataset, OwnShareDataset):
        batches, length = dataset.local_shares(splitter)
    else:
        batches = dataset.rebatch(splitter.count(batch_size))
        length = int(batches.cardinality())
        length = length if length >= 0 else None
    local_batches = batches.map(
        lambda *element: _shares(unpacked(element), splitter), num_parallel_calls=tf.data.AUTOTUNE
    )
    return local_batches, length


def known_rows(dataset: tf.data.Dataset) -> int:
    """Returns the number of rows in one pass over batches, if the pipeline's stages show it.

    They do if the last stages are `batch`, `cache` and `prefetch`, and the batched dataset has a
    known cardinality. A `map` after `batch` may change the number of rows, so stages before it are
    ignored.

    Args:
        dataset: Pipeline that yields batches.

    Returns:
        The number of rows, `UNKNOWN` or `ENDLESS`.
    """
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return ENDLESS
    kind = type(dataset).__name__
    if kind not in _PASSING_ON | _BATCHING:
        return UNKNOWN
    (source,) = dataset._inputs()
    if kind in _PASSING_ON:
        return known_rows(source)
    elements = int(source.cardinality())
    if elements < 0:
        return UNKNOWN
    whole = elements - elements % int(dataset._batch_size)
    return whole if bool(dataset._drop_remainder) else elements


def _batch_size(dataset: tf.data.Dataset, splitter: BatchSplitter) -> int:
    """Returns the global batch size."""
    batch_size = _visible_batch_size(dataset)
    if batch_size is None or not splitter.count(batch_size):
        received = f"batch({batch_size})" if batch_size else "no visible batch size"
        raise ValueError(
            f"With AutoShardPolicy.OFF the dataset must end in `batch(n)`, with n the global batch "
            f"size and at least the number of processes, {splitter.num_processes}. Received: "
            f"{received}."
        )
    return batch_size


def _visible_batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the batch size that a dataset declares or its last stages show, else None."""
    if isinstance(dataset, OwnShareDataset):
        return dataset.global_batch_size
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor))
    if size >= 0:
        return size
    # TensorFlow does not know the batch size of our datasets, which may be inputs of such stages.
    if type(dataset).__name__ not in _PASSING_ON | _CHOOSING:
        return None
    sizes = {_visible_batch_size(source) for source in dataset._inputs()}
    return sizes.pop() if len(sizes) == 1 else None


def _ceil(rows: int, size: int) -> int:
    return -(-rows // size)


def _last_batch(announced: Sequence[Sequence[int]]) -> tuple[int | None, list[int]] | None:
    """Returns the number of global batches, and each process's rows of the last one.

    Args:
        announced: Each process's number of rows, and its rows of a full global batch.

    Returns:
        The number, None if the data do not end, and the rows by rank; None instead of the pair if
        the processes have to agree on each batch.
    """
    if all(rows == ENDLESS for rows, _ in announced):
        return None, [full for _, full in announced]
    numbers = {_ceil(rows, full) for rows, full in announced}
    if any(rows <= 0 for rows, _ in announced) or len(numbers) > 1:
        return None
    number = numbers.pop()
    return number, [rows - (number - 1) * full for rows, full in announced]


def _with_known_counts(
    full: Sequence[int], last: Sequence[int], number: int | None, rank: int, splitter: BatchSplitter
) -> Callable[..., LocalBatch]:
    """Returns a function that turns a process's numbered batches into local batches.

    Args:
        full: Each process's rows of a full global batch.
        last: Each process's rows of the last global batch.
        number: Number of batches, None if they do not end.
        rank: Rank of this process.
        splitter: Splitter of global batches over the replicas.
    """

    def own_and_global(rows: Sequence[int]) -> tf.Tensor:
        return tf.constant([rows[rank], sum(rows)], tf.int64)

    def local_batch(index: tf.Tensor, *element) -> LocalBatch:
        counts = own_and_global(full)
        if number is not None:
            counts = tf.where(index < number - 1, counts, own_and_global(last))
        shares = _shares(unpacked(element), splitter)
        # Not `tf.debugging.Assert`: its branch costs more than everything else here.
        tf.raw_ops.Assert(
            condition=tf.reduce_sum(shares.rows) == counts[0],
            data=[
                "The data must have as many rows as their pipeline declares. Received on rank "
                f"{rank}, in a batch:",
                tf.reduce_sum(shares.rows),
                "rows instead of",
                counts[0],
            ],
        )
        return shares._replace(global_rows=counts[1])

    return local_batch


def _shares(batch: Any, splitter: BatchSplitter) -> LocalBatch:
    """Returns a process's rows of a global batch, split over its own replicas."""
    first, count = splitter.first_replica, splitter.local_replicas
    weights = splitter.weights_in_graph() if count > 1 else None
    own = None if weights is None else weights[first : first + count]
    local = BatchSplitter(0, count, count, own)
    return local.local_batch(count_rows(batch), lambda begin, end: take_rows(batch, begin, end))
