"""Arrays given to `fit`: one permutation for all processes, a new one each epoch."""

import random
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
        passes: The passes that have begun. What is assigned to it, the next pass goes on from.
    """

    def __init__(self, seed: int | None):
        self.seed = seed
        self.passes = 0

    def next_pass(self, samples: int, batch_size: int, within_batches: bool) -> np.ndarray:
        """Returns the order of the next pass: a permutation of `range(samples)`, int64.

        Args:
            samples: The number of samples.
            batch_size: The rows of a batch.
            within_batches: Whether batches stay where they are, and only their rows are shuffled.
        """
        # Counted, not drawn: TensorFlow's generators mix in the global seed, which may differ by
        # process.
        self.passes += 1
        indices = tf.range(samples, dtype=tf.int64)
        seed = [self.seed, self.passes]
        if not within_batches:
            return tf.random.experimental.stateless_shuffle(indices, seed).numpy()
        # Sorted by batch, and by chance within it.
        chance = tf.random.stateless_uniform([samples], seed, dtype=tf.float64)
        keys = tf.cast(indices // batch_size, tf.float64) + chance
        return tf.argsort(keys).numpy().astype(np.int64)


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

    # What is alike for all batches of a size is a constant here: no step has to compute it.
    alike = None if splitter is None else _portions(adapter, splitter)
    # A replica whose share has one size in all batches must not know it where others do not:
    # Keras's trackers of each output's loss count rows that are known ahead, and else batches.
    known = len(_sizes(adapter)) == 1

    @tf.autograph.experimental.do_not_convert
    def portion(size: tf.Tensor, *indices: tf.Tensor) -> Portion:
        rest = (tf.gather(constants, size) for constants in alike)
        if not known:
            indices = [tf.raw_ops.PlaceholderWithDefault(input=i, shape=[None]) for i in indices]
        return Portion(tuple(rows(part) for part in indices), *rest)

    # TensorFlow's optimizations write the whole pipeline down for each pass, arrays included.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return (
        _index_batches(adapter, order, splitter)
        .map(rows if splitter is None else portion, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )


def _sizes(adapter: ArrayDataAdapter) -> list[tuple[int, int]]:
    """Returns how many global batches there are of how many rows: whole ones, and a last one."""
    whole, left = divmod(adapter._num_samples, adapter._batch_size)
    sizes = [(whole, adapter._batch_size), (1, left)]
    return [(count, size) for count, size in sizes if count and size]


def _portions(adapter: ArrayDataAdapter, splitter: Splitter) -> list[np.ndarray]:
    """Returns the fields of portions but their parts, for each size of a batch: `[sizes, ...]`."""
    made = [splitter.portion(size, lambda begin, end: None)[1:] for _, size in _sizes(adapter)]
    return [np.stack([np.asarray(field) for field in fields]) for fields in zip(*made, strict=True)]


def _index_batches(
    adapter: ArrayDataAdapter, order: ArrayOrder, splitter: Splitter | None
) -> tf.data.Dataset:
    """Returns a dataset of the indices of each global batch: int64, shape `[rows]`.

    If there is a `splitter`, its elements are the number of the batch's size, see `_sizes`, and the
    indices of the own rows, for each replica of this process.
    """
    samples, batch_size = adapter._num_samples, adapter._batch_size

    @tf.autograph.experimental.do_not_convert
    def batches(indices: tf.Tensor) -> tf.data.Dataset:
        # Cut in one go: to batch single indices costs more than the rest of the pipeline. The
        # fewer operations are here, the sooner a pass begins.
        parts, begin = [], 0
        for number, (count, size) in enumerate(_sizes(adapter)):
            equal = tf.reshape(indices[begin : begin + count * size], [count, size])
            begin += count * size
            if splitter is None:
                parts.append(tf.data.Dataset.from_tensor_slices(equal))
                continue
            own = splitter.portion(size, lambda begin, end, equal=equal: equal[:, begin:end]).parts
            numbers = np.full(count, number)
            parts.append(tf.data.Dataset.from_tensor_slices((numbers, *own)))
        return parts[0] if len(parts) == 1 else parts[0].concatenate(parts[1])

    if order.seed is None:
        return batches(tf.range(samples, dtype=tf.int64))

    # Python's, called by the graph when it runs: its operations need not be made ready each time.
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
