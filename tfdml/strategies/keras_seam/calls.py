"""The call of `fit`, `evaluate` or `predict` that Keras is in, where it sets up the call's data."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.keras_seam.data_position import DataPosition


@dataclasses.dataclass
class Call:
    """A call of `fit`, `evaluate` or `predict`.

    Attributes:
        model: The model; None where data are set up outside of such a call.
        name: The call's name.
        trains: Whether the data that are set up next are those to train on: the first ones of a
            `fit` are, those that follow in the same call are its validation's.
        resumed: Where the data that are set up next are, if a callback resumes a `fit` with them.
        position: The same, while they are set up.
        extended: The strategy's extension, while data are set up for its replicas.
    """

    model: keras.Model | None = None
    name: str | None = None
    trains: bool = False
    resumed: DataPosition | None = None
    position: DataPosition | None = None
    extended: ReplicaExtended | None = None

    @contextlib.contextmanager
    def having(self, **attributes: Any) -> Iterator[None]:
        """While this is entered, attributes have other values."""
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)


# By context, because Keras tells neither its epoch iterator nor its data adapters of the model.
_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("_current", default=None)


def current_call() -> Call | None:
    """Returns the innermost call that Keras is in, such as the `evaluate` of a `fit`."""
    return _current.get()


@contextlib.contextmanager
def in_call(call: Call) -> Iterator[Call]:
    """While this is entered, Keras is in this call."""
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)
