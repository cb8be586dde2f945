"""Where tfdml enters TensorFlow 2.21: distributed variables outside of replicas.

| TensorFlow's function | what is different |
|---|---|
| `DistributedVariable` | is a Python number or a NumPy array where one is asked for |
| a loaded SavedModel's functions | called in the scope they take the first replica's values |
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.saved_model.load import _WrapperFunction

from tfdml.strategies.extended import ReplicaExtended


def _as_array(self: DistributedVariable, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.array(self.numpy(), dtype) if copy else np.asarray(self.numpy(), dtype)


# Without them `float(optimizer.learning_rate)` in a callback raises a TypeError. No `__bool__`:
# TensorFlow asks `if destinations:` of variables, and Keras's refuse it in one process, too.
_CONVERSIONS: dict[str, Callable] = {
    "__array__": _as_array,
    "__complex__": lambda self: complex(self.numpy()),
    "__float__": lambda self: float(self.numpy()),
    "__int__": lambda self: int(self.numpy()),
}


def _call_flat(original: Callable) -> Callable:
    """The call of a loaded function: TensorFlow lets replicas make it, but not the scope alone."""

    @functools.wraps(original)
    def call_flat(self, args, captured_inputs):
        extended = getattr(tf.distribute.get_strategy(), "extended", None)
        outside = tf.distribute.in_cross_replica_context()
        if outside and isinstance(extended, ReplicaExtended):
            captured_inputs = [
                x.values[0].handle if isinstance(x, DistributedVariable) else x
                for x in captured_inputs
            ]
        return original(self, args, captured_inputs)

    return call_flat


def install() -> None:
    """Puts the seam in place, once."""
    for name, convert in _CONVERSIONS.items():
        if name not in vars(DistributedVariable):
            setattr(DistributedVariable, name, convert)
    if not hasattr(_WrapperFunction._call_flat, "__wrapped__"):
        _WrapperFunction._call_flat = _call_flat(_WrapperFunction._call_flat)
