"""The current call of `fit`, `evaluate` or `predict`, known while Keras sets up its data."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from tfdml.strategies.keras_seam.data.data_position import DataPosition
from tfdml.strategies.replicas.extended import ReplicaExtended


@dataclasses.dataclass
class Call:
    """A call of `fit`, `evaluate` or `predict`.

    Attributes:
        model: The model; None if data are set up outside of such a call.
        name: Name of the method.
        trains: Whether the data that are set up next are training data: the first data of a `fit`
            are; later data in the same call are for validation.
        resumed: Position in the data that are set up next, if a callback resumes a `fit`.
        position: The same position, while the data are set up.
        extended: The strategy's extension, while data are set up for its replicas.
    """

    model: keras.Model | None = None
    name: str | None = None
    trains: bool = False
    resumed: DataPosition | None = None
    position: DataPosition | None = None
    extended: ReplicaExtended | None = None

    @contextlib.contextmanager
    def overriding(self, **attributes: Any) -> Iterator[None]:
        """Context manager: gives attributes other values."""
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)


# A context variable, because Keras does not pass the model to its epoch iterator or data adapters.
_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("_current", default=None)


def current_call() -> Call | None:
    """Returns the innermost call that Keras is in, such as the `evaluate` of a `fit`."""
    return _current.get()


@contextlib.contextmanager
def in_call(call: Call) -> Iterator[Call]:
    """Context manager: `current_call` returns this call."""
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)
