"""Calls of a step from Python that cost little before the step begins."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf


def with_direct_calls(function: Callable, model: keras.Model) -> Callable:
    """Returns Keras's train or test function, with a cheaper call for iterators of `tf.data`.

    Keras calls a `tf.function` with the iterator, and receives the logs in an optional. Taking both
    apart costs Python a millisecond a step. Here a graph is called with the iterator's handle, and
    returns the logs.

    Args:
        function: Keras's function of an iterator, or of a list of batches.
        model: The model; with several steps per execution, or eagerly, Keras's function is used.
    """
    graphs: dict[Any, Callable] = {}

    def call(iterator: Iterable) -> Any:
        direct = model.steps_per_execution == 1 and not model.run_eagerly
        if not direct or not isinstance(iterator, tf.data.Iterator):
            return function(iterator)
        spec = tf.data.IteratorSpec(iterator.element_spec)
        if spec not in graphs:
            graphs[spec] = _on_handle(function, spec)
        (handle,) = tf.nest.flatten(iterator, expand_composites=True)
        return graphs[spec](handle)

    return call


def _on_handle(function: Callable, spec: tf.data.IteratorSpec) -> Callable:
    """Returns a graph that runs a step on the next batch of the iterator of a handle."""

    @tf.autograph.experimental.do_not_convert
    def step(handle: tf.Tensor) -> Any:
        iterator = tf.nest.pack_sequence_as(spec, [handle], expand_composites=True)
        return function([iterator.get_next()])

    return tf.function(step, input_signature=[tf.TensorSpec([], tf.resource)])
