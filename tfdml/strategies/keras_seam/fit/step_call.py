"""Calls of a step from Python that cost little before the step begins."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf


def with_direct_calls(function: Callable, model: keras.Model) -> Callable:
    """Returns Keras's train or test function, with a cheaper call for iterators of `tf.data`.

    Keras calls a `tf.function` with the iterator, and receives the logs in an optional. Taking both
    apart, and finding the function's graph, costs Python a millisecond a step. Here the graph is
    found once for each iterator. It is called with the iterator's handle, and returns the logs.

    Args:
        function: Keras's function of an iterator, or of a list of batches.
        model: The model; with several steps per execution, or eagerly, Keras's function is used.
    """
    graphs: dict[Any, Callable] = {}
    # The latest iterator and its graph. Its data would live on with it.
    latest: tuple[Callable[[], Any], Callable] = (lambda: None, function)

    def call(iterator: Iterable) -> Any:
        nonlocal latest
        if not isinstance(iterator, tf.data.Iterator) or not _is_direct(model):
            return function(iterator)
        if latest[0]() is not iterator:
            latest = weakref.ref(iterator), graph_for(iterator)
        (handle,) = tf.nest.flatten(iterator, expand_composites=True)
        return latest[1](handle)

    def graph_for(iterator: tf.data.Iterator) -> Callable:
        spec = tf.data.IteratorSpec(iterator.element_spec)
        if spec not in graphs:
            graphs[spec] = _on_handle(function, spec)
        return graphs[spec]

    return call


def _is_direct(model: keras.Model) -> bool:
    """Returns whether a call runs one step in a graph."""
    eagerly = model.run_eagerly or tf.config.functions_run_eagerly()
    return model.steps_per_execution == 1 and not eagerly


def _on_handle(function: Callable, spec: tf.data.IteratorSpec) -> Callable:
    """Returns a graph that runs a step on the next batch of the iterator of a handle."""

    @tf.autograph.experimental.do_not_convert
    def step(handle: tf.Tensor) -> Any:
        iterator = tf.nest.pack_sequence_as(spec, [handle], expand_composites=True)
        return function([iterator.get_next()])

    signature = [tf.TensorSpec([], tf.resource)]
    return tf.function(step, input_signature=signature).get_concrete_function()
