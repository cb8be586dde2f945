"""Arrays given to `fit`: one permutation for all processes, a new one each epoch."""

from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdml.collectives.collective import Collective


def agreed_seed(collective: Collective) -> int:
    """Returns a seed that is the same on all processes: rank 0 draws it from TensorFlow."""
    own = tf.random.uniform([], maxval=tf.int64.max, dtype=tf.int64)
    return int(collective.broadcast(own, "data_seed"))


def shuffled_batches(adapter: ArrayDataAdapter, seed: int) -> tf.data.Dataset:
    """Returns the adapter's global batches in an order that follows from `seed` alone.

    Each pass over the dataset has an order of its own, the k-th pass the same on every process.

    Args:
        adapter: Keras's adapter of the arrays, with `shuffle=True` or `"batch"` (which keeps the
            batches and shuffles within them).
        seed: The seed.
    """
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    arrays = tree.lists_to_tuples(arrays)
    samples, within_batches = adapter._num_samples, adapter._shuffle == "batch"

    @tf.autograph.experimental.do_not_convert
    def order(pass_seed: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(samples, dtype=tf.int64)
        if not within_batches:
            indices = tf.random.experimental.stateless_shuffle(indices, seed=[seed, pass_seed])
        batches = tf.data.Dataset.from_tensor_slices(indices).batch(adapter._batch_size)
        if within_batches:
            batches = batches.enumerate().map(
                lambda number, batch: tf.random.experimental.stateless_shuffle(
                    batch, seed=[seed, pass_seed + number]
                )
            )
        return batches

    @tf.autograph.experimental.do_not_convert
    def rows(indices: tf.Tensor) -> Any:
        def gather(array):
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, indices)
            # None tells `traverse` to go on into a structure.
            return tf.gather(array, indices, axis=0) if tf.is_tensor(array) else None

        return tree.traverse(gather, arrays)

    passes = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    batches = passes.flat_map(order).apply(
        tf.data.experimental.assert_cardinality(adapter.num_batches)
    )
    return batches.map(rows, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
