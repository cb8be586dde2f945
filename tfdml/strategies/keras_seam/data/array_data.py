"""Batches of arrays given to `fit`, in a permutation per epoch that all processes share."""

import random
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdml.collectives.collective import Collective
from tfdml.strategies.input.local_batch import (
    DIGEST_SIZE,
    BatchSplitter,
    DeferredSplitter,
    GlobalBatch,
    LocalBatch,
)


def agreed_seed(collective: Collective) -> int:
    """Returns a seed drawn by rank 0 and broadcast to all processes.

    Like Keras's seeds of initializers, it is drawn from Python's generator: it follows
    `keras.utils.set_random_seed` and does not depend on the number of processes.
    """
    own = tf.constant(random.getrandbits(62), tf.int64)
    return int(collective.broadcast(own, "data_seed"))


class ArrayOrder:
    """Order of the samples in each pass over arrays.

    Args:
        seed: Seed of the orders; None keeps the order of the arrays.

    Attributes:
        passes: Number of passes begun. Assign it to choose the order of the next pass.
    """

    def __init__(self, seed: int | None):
        self.seed = seed
        self.passes = 0

    def next_pass(self, samples: int, batch_size: int, within_batches: bool) -> np.ndarray:
        """Returns the order of the next pass: a permutation of `range(samples)`, int64.

        Args:
            samples: Number of samples.
            batch_size: Number of rows of a batch.
            within_batches: Whether batches keep their order, and only the rows within each are
                shuffled.
        """
        # The pass number is counted, not drawn: TensorFlow's generators mix in the global seed,
        # which may differ between processes.
        self.passes += 1
        indices = tf.range(samples, dtype=tf.int64)
        seed = [self.seed, self.passes]
        if not within_batches:
            return tf.random.experimental.stateless_shuffle(indices, seed).numpy()
        # Sort by batch, and randomly within each batch.
        chance = tf.random.stateless_uniform([samples], seed, dtype=tf.float64)
        keys = tf.cast(indices // batch_size, tf.float64) + chance
        return tf.argsort(keys).numpy().astype(np.int64)


def array_batches(
    adapter: ArrayDataAdapter, order: ArrayOrder, splitter: BatchSplitter | None
) -> tf.data.Dataset:
    """Returns the adapter's global batches in an order that depends only on a seed.

    Each pass over the dataset has a different order, and the k-th pass has the same order on every
    process.

    Args:
        adapter: Keras's adapter of the arrays, with `shuffle=True` or `"batch"` (which keeps the
            batches and shuffles within them).
        order: Order of the samples in each pass.
        splitter: Splitter of the batches, with which this process reads only its own rows; or None.

    Returns:
        A dataset of batches, or of `LocalBatch`s of batches if there is a `splitter`; of
        `GlobalBatch`es if it leaves the split to the steps.
    """
    deferred = isinstance(splitter, DeferredSplitter)
    splitter = None if deferred else splitter
    # Explicitly on the CPU, which runs the pipeline: TensorFlow would copy all of them to a GPU.
    with tf.device("CPU:0"):
        arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
        # The pipeline's functions capture tensors; NumPy arrays would be copied into its graph.
        arrays = tree.map_structure(
            lambda a: tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a,
            tree.lists_to_tuples(arrays),
        )

    @tf.autograph.experimental.do_not_convert
    def rows(indices: tf.Tensor) -> Any:
        def gather(array):
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, indices)
            # Returning None makes `traverse` descend into a structure.
            return tf.gather(array, indices, axis=0) if tf.is_tensor(array) else None

        return tree.traverse(gather, arrays)

    # Values shared by all batches of a size are constants, which no step has to compute.
    counts = None if splitter is None else _counts(adapter, splitter)
    # A replica whose share has the same size in all batches must not know it statically if others
    # do not: Keras's trackers of each output's loss count statically known rows, else batches.
    known = len(_sizes(adapter)) == 1

    @tf.autograph.experimental.do_not_convert
    def local_batch(size: tf.Tensor, *indices: tf.Tensor) -> LocalBatch:
        rest = (tf.gather(constants, size) for constants in counts)
        if not known:
            indices = [tf.raw_ops.PlaceholderWithDefault(input=i, shape=[None]) for i in indices]
        return LocalBatch(tuple(rows(part) for part in indices), *rest)

    @tf.autograph.experimental.do_not_convert
    def global_batch(indices: tf.Tensor) -> GlobalBatch:
        # The arrays themselves are compared between processes, so batches need no digest.
        return GlobalBatch(rows(indices), tf.zeros([DIGEST_SIZE]))

    whole = global_batch if deferred else rows
    # TensorFlow's optimizations serialize the whole pipeline for each pass, including the arrays.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return (
        _index_batches(adapter, order, splitter)
        .map(whole if splitter is None else local_batch, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )


def _sizes(adapter: ArrayDataAdapter) -> list[tuple[int, int]]:
    """Returns pairs of a number of global batches and their rows: full batches, then a last one."""
    whole, remainder = divmod(adapter._num_samples, adapter._batch_size)
    sizes = [(whole, adapter._batch_size), (1, remainder)]
    return [(count, size) for count, size in sizes if count and size]


def _counts(adapter: ArrayDataAdapter, splitter: BatchSplitter) -> list[np.ndarray]:
    """Returns the fields of local batches after `parts`, by size of the batch: `[sizes, ...]`."""
    made = [splitter.local_batch(size, lambda begin, end: None)[1:] for _, size in _sizes(adapter)]
    return [np.stack([np.asarray(field) for field in fields]) for fields in zip(*made, strict=True)]


def _index_batches(
    adapter: ArrayDataAdapter, order: ArrayOrder, splitter: BatchSplitter | None
) -> tf.data.Dataset:
    """Returns a dataset of the indices of each global batch: int64, shape `[rows]`.

    With a `splitter`, its elements are the index of the batch's size in `_sizes`, and the indices
    of each local replica's rows.
    """
    samples, batch_size = adapter._num_samples, adapter._batch_size

    @tf.autograph.experimental.do_not_convert
    def batches(indices: tf.Tensor) -> tf.data.Dataset:
        # Cut all batches at once: batching single indices costs more than the rest of the pipeline.
        # Fewer operations here also make a pass start sooner.
        parts, begin = [], 0
        for number, (count, size) in enumerate(_sizes(adapter)):
            equal = tf.reshape(indices[begin : begin + count * size], [count, size])
            begin += count * size
            if splitter is None:
                parts.append(tf.data.Dataset.from_tensor_slices(equal))
                continue
            own = splitter.local_batch(
                size, lambda begin, end, equal=equal: equal[:, begin:end]
            ).parts
            numbers = np.full(count, number)
            parts.append(tf.data.Dataset.from_tensor_slices((numbers, *own)))
        return parts[0] if len(parts) == 1 else parts[0].concatenate(parts[1])

    if order.seed is None:
        return batches(tf.range(samples, dtype=tf.int64))

    # A Python function that the graph calls: its operations need no setup for each pass.
    def next_pass() -> np.ndarray:
        return order.next_pass(samples, batch_size, adapter._shuffle == "batch")

    @tf.autograph.experimental.do_not_convert
    def shuffled(_: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(next_pass, [], tf.int64), [samples])

    return (
        tf.data.Dataset.range(1)
        .map(shuffled)
        .flat_map(batches)
        .apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
    )
