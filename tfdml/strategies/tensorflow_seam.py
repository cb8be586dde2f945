"""Patches of TensorFlow for distributed variables outside of replicas, tapes and heartbeats.

They depend on internals of TensorFlow 2.20 and 2.21.

| TensorFlow's function | what is different |
|---|---|
| `DistributedVariable` | converts to a Python number or a NumPy array |
| `reset_default_graph` | the scope stays entered: `clear_session` may be called in it |
| a loaded SavedModel's functions | use the first replica's values if called in the scope |
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager.context import context
from tensorflow.python.eager.record import (
    VariableWatcher,
    could_possibly_record,
    stop_recording,
)
from tensorflow.python.framework import ops
from tensorflow.python.ops import variable_scope
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.saved_model.load import _WrapperFunction

from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.replicas.extended import ReplicaExtended


def _as_array(self: DistributedVariable, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.array(self.numpy(), dtype) if copy else np.asarray(self.numpy(), dtype)


# Without them `float(optimizer.learning_rate)` in a callback raises a TypeError. No `__bool__`:
# TensorFlow evaluates `if destinations:` on variables, and Keras's variables refuse it in a single
# process, too.
_CONVERSIONS: dict[str, Callable] = {
    "__array__": _as_array,
    "__complex__": lambda self: complex(self.numpy()),
    "__float__": lambda self: float(self.numpy()),
    "__int__": lambda self: int(self.numpy()),
}


def _call_flat(original: Callable) -> Callable:
    """Lets a loaded function be called in the scope; TensorFlow allows it only in replicas."""

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


def _reset_default_graph(original: Callable) -> Callable:
    """Keeps the scope in `keras.utils.clear_session`, which drops the graph that records it."""

    @functools.wraps(original)
    def reset_default_graph():
        extended = getattr(tf.distribute.get_strategy(), "extended", None)
        before = ops.get_default_graph()
        original()
        if isinstance(extended, ReplicaExtended | ParameterServerExtended):
            after = ops.get_default_graph()
            # Both, because on exit the scope restores the earlier state through its own graph.
            after._thread_local = before._thread_local
            for key in (variable_scope._VARSTORE_KEY, variable_scope._VARSCOPESTORE_KEY):
                after._collections[key] = before._collections.get(key, [])

    return reset_default_graph


def is_inner(tape: tf.GradientTape) -> bool:
    """Returns whether a tape other than this one is recording."""
    if not tape._recording:
        return could_possibly_record()
    with tape.stop_recording():
        return could_possibly_record()


def is_recorded() -> bool:
    """Returns whether a tape is recording in this thread."""
    return could_possibly_record()


def is_in_control_flow() -> bool:
    """Returns whether a loop or a branch of the graph is being traced."""
    graph = None if tf.executing_eagerly() else ops.get_default_graph()
    while graph is not None and not isinstance(graph, ControlFlowFuncGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Context manager: no tape records what this thread computes."""
    return stop_recording()


def watching_variables() -> contextlib.AbstractContextManager[VariableWatcher]:
    """Context manager: sees trainable variables that are read, recorded or not.

    Its value has the method `watched_variables`.
    """
    return VariableWatcher()


@contextlib.contextmanager
def heartbeat_limit(seconds: float) -> Iterator[None]:
    """Context manager: strategies of TensorFlow that start workers allow such a silence of theirs.

    Args:
        seconds: Seconds without a message after which a worker is taken for lost. An answer may
            take half as long.
    """
    own = context()
    own.configure_coordination_service = functools.partial(
        own.configure_coordination_service, heartbeat_timeout_in_ms=round(1000 * seconds)
    )
    try:
        yield
    finally:
        del own.configure_coordination_service  # The class has the original.


REPLACED: list[tuple[Any, str]] = [
    (ops, "reset_default_graph"),
    (_WrapperFunction, "_call_flat"),
]


def install() -> None:
    """Installs the patches, once."""
    for name, convert in _CONVERSIONS.items():
        if name not in vars(DistributedVariable):
            setattr(DistributedVariable, name, convert)
    if not hasattr(_WrapperFunction._call_flat, "__wrapped__"):
        _WrapperFunction._call_flat = _call_flat(_WrapperFunction._call_flat)
    if not hasattr(ops.reset_default_graph, "__wrapped__"):
        # `tf.compat.v1` has its own reference to the function.
        reset = _reset_default_graph(ops.reset_default_graph)
        ops.reset_default_graph = tf.compat.v1.reset_default_graph = reset
