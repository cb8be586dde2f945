"""State of callbacks: the plain attributes that training has changed, found by comparison."""

import contextlib
import copy
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdml.callbacks.chief_only import ChiefOnly

# Attributes that Keras sets, or derives again: `min_delta` gets its sign with the first epoch.
_NOT_STATE = {"_model", "model", "params", "min_delta", "monitor_op"}
_PLAIN = (bool, int, float, str, type(None))
_ARRAY, _TUPLE = "__array__", "__tuple__"


class CallbackState:
    """State of a `fit`'s callbacks: the attributes that have changed since its beginning.

    So arguments that the program passes to a callback take effect on a restart, while results of
    training (the best value, the epochs waited) are restored. A callback with the methods
    `get_state()` and `set_state(state)` defines its own state; `state` is plain data and NumPy
    arrays.

    Args:
        callbacks: The callbacks, the same in every run of the program.

    Attributes:
        accepts_changes: Whether `restore` leaves out the state of callbacks that are gone.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]):
        # The strategies' own callbacks depend on the number of ranks, so they are left out.
        own = "tfdml.strategies."
        inner = [c.callback if isinstance(c, ChiefOnly) else c for c in callbacks]
        self._callbacks = [c for c in inner if not type(c).__module__.startswith(own)]
        self._start = [copy.deepcopy(_plain_attributes(c)) for c in self._callbacks]
        kinds = [type(c).__name__ for c in self._callbacks]
        self._names = [f"{kind}:{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
        self._warned: set[str] = set()
        self.accepts_changes = False

    def read(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns the state as data for JSON, and its arrays by name."""
        arrays: dict[str, np.ndarray] = {}
        states = {}
        for name, callback, start in zip(self._names, self._callbacks, self._start, strict=True):
            if hasattr(callback, "get_state"):
                state = callback.get_state()
            else:
                now = _plain_attributes(callback)
                state = {k: v for k, v in now.items() if k not in start or _differ(v, start[k])}
                self._warn_of_others(callback)
            if state:
                states[name] = _packed(state, f"callback/{name}", arrays)
        return states, arrays

    def restore(self, states: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Restores the state that `read` returned.

        Raises:
            ValueError: If the callbacks have changed.
        """
        unknown = sorted(set(states) - set(self._names))
        if unknown and not self.accepts_changes:
            raise ValueError(
                f"`callbacks` must be those that the checkpoint was saved with, in the same order. "
                f"Received: {self._names}, and a state of {unknown}. Change them back, use another "
                f'directory, or leave their state out with on_change="accept".'
            )
        for name, callback, start in zip(self._names, self._callbacks, self._start, strict=True):
            state = _unpacked(states.get(name, {}), arrays)
            if hasattr(callback, "set_state"):
                if name in states:
                    callback.set_state(state)
                continue
            for attribute, value in {**copy.deepcopy(start), **state}.items():
                with contextlib.suppress(AttributeError):  # A property without a setter.
                    setattr(callback, attribute, value)

    def _warn_of_others(self, callback: keras.callbacks.Callback) -> None:
        module = type(callback).__module__
        if module.startswith(("keras.", "tfdml.")):
            return
        plain = _plain_attributes(callback)
        others = sorted(k for k in vars(callback) if k not in plain and k not in _NOT_STATE)
        name = type(callback).__name__
        if others and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name}: checkpoints do not hold {', '.join(others)}: not numbers, strings, "
                f"arrays, or lists and dicts of them. If training changes them, give {name} "
                f"methods `get_state()` and `set_state(state)`.",
                stacklevel=2,
            )


def _plain_attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    found = vars(callback).items()
    return {k: v for k, v in found if k not in _NOT_STATE and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return isinstance(value, (*_PLAIN, np.generic))


def _differ(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return True
    if isinstance(a, (list, tuple)):
        return len(a) != len(b) or any(_differ(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(_differ(v, b[k]) for k, v in a.items())
    if isinstance(a, np.ndarray):
        return a.shape != b.shape or a.dtype != b.dtype or a.tobytes() != b.tobytes()
    return a != b


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Returns plain data for JSON, with the arrays moved to `arrays`."""
    if isinstance(value, dict):
        return {k: _packed(v, f"{name}/{k}", arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        packed = [_packed(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]
        return {_TUPLE: packed} if isinstance(value, tuple) else packed
    if isinstance(value, (np.ndarray, np.generic)):
        arrays[name] = np.array(value)  # A copy, because the callback may change its own.
        return {_ARRAY: name}
    return value


def _unpacked(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpacked(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_unpacked(v, arrays) for v in value[_TUPLE])
    if _ARRAY in value:
        array = arrays[value[_ARRAY]].copy()
        return array if array.shape else array[()]
    return {k: _unpacked(v, arrays) for k, v in value.items()}
