"""Replacement of Keras's functions by ours, each once."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

# A function of Keras's, or the getter of a property: its owner, its name, and a function that takes
# the original and returns its replacement.
Replacement = tuple[Any, str, Callable[[Callable], Callable]]


def put_in_place(replacements: Iterable[Replacement]) -> None:
    """Replaces Keras's functions; those that are already replaced are left alone."""
    for owner, name, make in replacements:
        if original(owner, name) is not None:
            continue
        keras_s = inspect.getattr_static(owner, name)
        getter = isinstance(keras_s, property)
        function = keras_s.fget if getter else keras_s
        ours = functools.wraps(function)(make(function))
        ours._tfdml_replaces = keras_s
        setattr(owner, name, property(ours, doc=keras_s.__doc__) if getter else ours)


def original(owner: Any, name: str) -> Any:
    """Returns the original of a replaced function; None if it has not been replaced."""
    found = inspect.getattr_static(owner, name)
    function = found.fget if isinstance(found, property) else found
    return getattr(function, "_tfdml_replaces", None)
