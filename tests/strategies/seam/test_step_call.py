"""Checks the calls of a step with the handle of an iterator alone."""

import gc
import types
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tfdml.strategies.keras_seam.fit.step_call import with_direct_calls


def model(steps: int = 1, eagerly: bool = False) -> types.SimpleNamespace:
    """Returns the two attributes of a model that decide how its function is called."""
    return types.SimpleNamespace(steps_per_execution=steps, run_eagerly=eagerly)


class Recorded:
    """Function of a list of batches or an iterator that records how it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, batches):
        self.calls.append(type(batches))
        (batch, *_) = batches if isinstance(batches, list) else [next(batches)]
        return {"sum": tf.add_n([tf.reduce_sum(t) for t in tf.nest.flatten(batch)])}


def dataset(rows: int, start: float = 0.0) -> tf.data.Dataset:
    """Returns batches of two tensors, the last one shorter."""
    x = np.arange(rows, dtype="f4") + start
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": 10 * x}).batch(2)


def test_a_graph_serves_all_iterators_of_a_spec():
    function = Recorded()
    call = with_direct_calls(function, model())
    for start in (0.0, 1.0):
        iterator = iter(dataset(3, start))
        sums = [float(call(iterator)["sum"]) for _ in range(2)]
        assert sums == [11 * (1 + 2 * start), 11 * (2 + start)]
        with pytest.raises(tf.errors.OutOfRangeError):
            call(iterator)
    assert function.calls == [list], "Traced once, with a list of batches."
    call(iter(dataset(4).map(lambda batch: batch["x"])))
    assert function.calls == [list, list]


def test_an_iterator_is_freed_with_its_data():
    class Data:
        """Data that a generator holds while its data set is read."""

    def batches():
        held = Data()
        alive.append(weakref.ref(held))
        while True:
            yield [1.0]

    alive = []
    spec = tf.TensorSpec([1], tf.float32)
    iterator = iter(tf.data.Dataset.from_generator(batches, output_signature=spec))
    call = with_direct_calls(Recorded(), model())
    call(iterator)
    assert alive[0]() is not None
    del iterator
    gc.collect()
    assert alive[0]() is None


@pytest.mark.parametrize("composite", [tf.RaggedTensor, tf.SparseTensor])
def test_batches_keep_their_types(composite):
    rows = tf.ragged.constant([[1.0, 2.0], [3.0]])
    given = rows if composite is tf.RaggedTensor else rows.to_sparse()
    kinds = []

    def function(batches):
        kinds.append(type(batches[0]))
        return tf.reduce_sum(batches[0].values)

    total = with_direct_calls(function, model())(iter(tf.data.Dataset.from_tensors(given)))
    assert (kinds, float(total)) == ([composite], 6.0)


@pytest.mark.parametrize("which", [model(steps=2), model(eagerly=True)])
def test_other_executions_use_the_function_of_keras(which):
    function = Recorded()
    iterator = iter(dataset(2))
    with_direct_calls(function, which)(iterator)
    assert function.calls == [type(iterator)]


def test_generators_are_passed_on():
    function = Recorded()
    with_direct_calls(function, model())(batch for batch in [tf.ones([2])])
    assert function.calls == [types.GeneratorType]
