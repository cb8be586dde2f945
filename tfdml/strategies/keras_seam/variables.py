"""Replacements for variables created, assigned and saved in the scope, outside of replicas."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.saving import saving_lib

from tfdml.strategies.keras_seam.current import get_extended, is_outside_of_replicas
from tfdml.strategies.keras_seam.initial_rows import ALIKE, row_draw
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.block_passes import note_change
from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.parameter_server.initial_value import InitialValue
from tfdml.strategies.sharded.variable_parts import is_dealt


def _initialize(original: Callable) -> Callable:
    """Initializes a layer's variables outside of a function being traced, as by `Dataset.map`."""

    def initialize_with_initializer(self, initializer):
        make = functools.partial(original, self, initializer)
        if isinstance(tf.distribute.get_strategy().extended, ParameterServerExtended):
            value = _on_servers(initializer, self._shape, self._dtype)
            make = functools.partial(self._initialize, value)
        extended = get_extended(tf.distribute.get_strategy())
        if is_dealt(self) and extended is not None:
            with tf.init_scope(), extended.making_own_variables():
                return make()
        if tf.executing_eagerly() or not is_outside_of_replicas():
            return make()
        # Other replicas take the first replica's value, which does not belong to that function.
        with tf.init_scope():
            return make()

    return initialize_with_initializer


def _on_servers(initializer: Callable, shape: Sequence[int], dtype: str) -> InitialValue:
    """Returns the initial value of a variable on servers, of which each part draws its own rows."""

    def whole() -> tf.Tensor:
        return keras.ops.convert_to_tensor(initializer(shape, dtype=dtype))

    @functools.cache
    def draw() -> Callable[[int, int], tf.Tensor] | None:
        # Once for all parts: an initializer may draw another seed each time.
        return row_draw(initializer, shape, tf.as_dtype(dtype))

    def rows(first: int, count: int) -> tf.Tensor:
        if isinstance(initializer, ALIKE):
            return initializer((count, *shape[1:]), dtype=dtype)
        return whole()[first : first + count] if draw() is None else draw()(first, count)

    return InitialValue(tf.TensorShape(shape), tf.as_dtype(dtype), whole, rows)


def _array(original: Callable) -> Callable:
    def __array__(self, dtype=None, copy=None):
        array = original(self, dtype)
        return np.array(array) if copy else array

    return __array__


def _direct_assign(original: Callable) -> Callable:
    """Assigns the whole of a metric's state, which is the sum over the replicas.

    In a block of `remat`, the value before is noted.
    """

    def direct_assign(self, value):
        note_change(self)
        extended = get_extended(tf.distribute.get_strategy())
        summed = self.aggregation == "sum" and self.synchronization == "on_read"
        if extended is None or not summed or not tf.distribute.in_cross_replica_context():
            return original(self, value)
        extended.assign_whole(self._value, tf.cast(value, self._value.dtype))

    return direct_assign


def _handle(original: Callable) -> Callable:
    """Returns the handle that a tape watches: outside of replicas, the first replica's."""

    def handle(self):
        copies = getattr(self._value, "values", None)
        outside = isinstance(copies, tuple) and is_outside_of_replicas()
        return copies[0].handle if outside else original(self)

    return handle


def _attributes_to_skip(original: Callable) -> Callable:
    """Finds attribute names to skip in files, for which Keras creates an optimizer or a layer.

    In the scope, creating its variables would be a collective, but one rank may save alone.
    """
    known: dict[str, Any] = {}

    def get_attr_skipset(obj_type):
        if not is_outside_of_replicas():
            return original(obj_type)
        if obj_type not in known:
            # A new thread is not in the scope.
            with ThreadPoolExecutor(1) as thread:
                known[obj_type] = thread.submit(original, obj_type).result()
        return known[obj_type]

    return get_attr_skipset


REPLACEMENTS: list[Replacement] = [
    (Variable, "handle", _handle),
    (Variable, "_initialize_with_initializer", _initialize),
    (Variable, "__array__", _array),
    (Variable, "_direct_assign", _direct_assign),
    (saving_lib, "get_attr_skipset", _attributes_to_skip),
]
