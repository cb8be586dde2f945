"""Arrays given to `fit`: one permutation for all processes, a new one each epoch."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdml.collectives.collective import Collective
from tfdml.strategies.share import Portion, Splitter


def agreed_seed(collective: Collective) -> int:
    """Returns a seed that is the same on all processes: rank 0 draws it.

    It is drawn from Python's generator, as Keras draws the seeds of initialisers: it follows
    `keras.utils.set_random_seed`, and does not depend on the number of processes.
    """
    own = tf.constant(random.getrandbits(62), tf.int64)
    return int(collective.broadcast(own, "data_seed"))


class ArrayOrder:
    """The order of arrays in each pass over them.

    Args:
        seed: What the orders follow from; None keeps the order of the arrays.

    Attributes:
        passes: The passes that have begun: int64. What is assigned to it, the next pass goes on
            from.
    """

    def __init__(self, seed: int | None):
        self.seed = seed
        self.passes = tf.Variable(0, trainable=False, dtype=tf.int64)


def array_batches(
    adapter: ArrayDataAdapter, order: ArrayOrder, splitter: Splitter | None
) -> tf.data.Dataset:
    """Returns the adapter's global batches in an order that follows from a seed alone.

    Each pass over the dataset has an order of its own, the k-th pass the same on every process.

    Args:
        adapter: Keras's adapter of the arrays, with `shuffle=True` or `"batch"` (which keeps the
            batches and shuffles within them).
        order: The order.
        splitter: What splits the batches; this process then reads its own rows only.

    Returns:
        A dataset of batches, or of `Portion`s of batches if there is a `splitter`.
    """
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    # Tensors are captured by the pipeline's functions; NumPy arrays would be copied into its graph.
    arrays = tree.map_structure(
        lambda a: tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a,
        tree.lists_to_tuples(arrays),
    )

    @tf.autograph.experimental.do_not_convert
    def rows(indices: tf.Tensor) -> Any:
        def gather(array):
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, indices)
            # None tells `traverse` to go on into a structure.
            return tf.gather(array, indices, axis=0) if tf.is_tensor(array) else None

        return tree.traverse(gather, arrays)

    @tf.autograph.experimental.do_not_convert
    def portion(indices: Portion) -> Portion:
        return indices._replace(parts=tuple(rows(part) for part in indices.parts))

    return (
        _index_batches(adapter, order, splitter)
        .map(rows if splitter is None else portion, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def _index_batches(
    adapter: ArrayDataAdapter, order: ArrayOrder, splitter: Splitter | None
) -> tf.data.Dataset:
    """Returns a dataset of the indices of each global batch: int64, shape `[rows]`.

    If there is a `splitter`, it is one of portions: their parts are the indices of own rows.
    """
    samples, size, seed = adapter._num_samples, adapter._batch_size, order.seed
    whole = samples // size * size

    def batches(indices: tf.Tensor, pass_number: tf.Tensor | None = None) -> tf.data.Dataset:
        # Cut in one go: to batch single indices costs more than the rest of the pipeline.
        equal = [tf.reshape(indices[:whole], [whole // size, size])]
        if whole < samples:
            equal.append(indices[None, whole:])
        if pass_number is not None:
            equal = [_shuffled_rows(batch, [seed, pass_number]) for batch in equal]
        first, *rest = [_slices(batch, splitter) for batch in equal]
        return first.concatenate(rest[0]) if rest else first

    if seed is None:
        return batches(tf.range(samples, dtype=tf.int64))

    @tf.autograph.experimental.do_not_convert
    def one_pass(pass_number: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(samples, dtype=tf.int64)
        if adapter._shuffle == "batch":
            return batches(indices, pass_number)
        shuffle = tf.random.experimental.stateless_shuffle
        return batches(shuffle(indices, seed=[seed, pass_number]))

    # Counted, not drawn: `Dataset.random` mixes in the global seed, which may differ by process.
    @tf.autograph.experimental.do_not_convert
    def next_pass(_: tf.Tensor) -> tf.Tensor:
        return order.passes.assign_add(1)

    return (
        tf.data.Dataset.range(1)
        .map(next_pass)
        .flat_map(one_pass)
        .apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
    )


def _shuffled_rows(batches: tf.Tensor, seed: Sequence) -> tf.Tensor:
    """Returns `batches` (`[batches, rows]`) with each batch in an order of its own."""
    keys = tf.random.stateless_uniform(tf.shape(batches), seed)
    return tf.gather(batches, tf.argsort(keys), batch_dims=1)


def _slices(batches: tf.Tensor, splitter: Splitter | None) -> tf.data.Dataset:
    """Returns the rows of `batches` (`[batches, rows]`) one by one, or the portions of them."""
    if splitter is None:
        return tf.data.Dataset.from_tensor_slices(batches)
    portion = splitter.portion(batches.shape[1], lambda begin, end: batches[:, begin:end])
    # What is alike for all these batches is repeated here: no step has to compute it.
    rest = [tf.repeat(part[None], tf.shape(batches)[0], 0) for part in portion[1:]]
    return tf.data.Dataset.from_tensor_slices(Portion(portion.parts, *rest))
