"""Times at which the exchanges of a recorded step begin and end."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.observed_collective import ExchangeListener, ObservedExchange
from tfdml.runtime.timing.time_recorder import TimeRecorder
from tfdml.timeline.recording import BEGIN, END


class ExchangeTimer(ExchangeListener):
    """Listener that marks the exchanges in recorded steps; elsewhere it does nothing.

    An exchange begins when this process's tensors exist, and ends when its result does: waiting for
    other processes, and for exchanges before it, is a part of it.

    Args:
        recorder: TimeRecorder of this process.
    """

    def __init__(self, recorder: TimeRecorder):
        self._recorder = recorder

    @contextlib.contextmanager
    def exchanging(self, exchange: ObservedExchange) -> Iterator[None]:
        """Context manager: an exchange is made."""
        if not self._recorder.is_in_step:
            yield
            return
        self._recorder.describe_exchange(
            exchange.name,
            operation=exchange.operation,
            bytes=_nbytes(exchange.tensors),
            ranks=exchange.ranks,
        )
        name = exchange.name
        exchange.tensors = self._recorder.passing(f"{name}:{BEGIN}", exchange.tensors)
        yield
        exchange.results = self._recorder.passing(f"{name}:{END}", exchange.results)

    def noted(self, tensors: Sequence[Any], mark: str) -> list:
        """Notes in a recorded step when tensors exist; see `Collective`."""
        return self._recorder.passing(mark, tensors)


def _nbytes(tensors: Sequence[tf.Tensor]) -> int | None:
    """Returns the bytes of tensors, None if a shape is not known."""
    counts = [tensor.shape.num_elements() for tensor in tensors]
    if None in counts:
        return None
    return sum(n * t.dtype.size for n, t in zip(counts, tensors, strict=True))
