"""Watch over a process's exchanges: what it waits in, what its graphs exchange, begun and done."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdml.collectives.observed_collective import ExchangeListener, ObservedExchange
from tfdml.runtime.guard.activity import Activity
from tfdml.runtime.hang_report.exchange_log import ExchangeLog
from tfdml.runtime.plain_words import in_plain_words


class ExchangeWatch(ExchangeListener):
    """Listener that notes each exchange of this process for the guard and for reports.

    Args:
        activity: Activity record of this process, which the guard reads.
        log: Record of what has begun and ended.
    """

    def __init__(self, activity: Activity, log: ExchangeLog):
        self._activity = activity
        self._log = log

    @contextlib.contextmanager
    def exchanging(self, exchange: ObservedExchange) -> Iterator[None]:
        """Context manager: an exchange is made.

        An eager one marks the process as waiting. One in a graph is noted when it is traced, and
        the graph notes each time that it begins and ends.
        """
        operation = f"{exchange.operation} of {exchange.name}"
        if tf.executing_eagerly():
            name = f"{exchange.name} ({exchange.operation})"
            with in_plain_words(), self._activity.waiting(operation), self._log.eager(name):
                yield
            return
        self._activity.note_collective(operation, _in_words(exchange))
        step = self._activity.tracing
        is_named = step is None or exchange.name.startswith(f"{step}/")
        name = exchange.name if is_named else f"{step}/{exchange.name}"
        tensors = exchange.tensors
        yield
        self._log.note_in_graph(f"{name} ({exchange.operation})", tensors, exchange.results)

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """Context manager: this process waits for the others in `what`."""
        return self._activity.waiting(what)


def _in_words(exchange: ObservedExchange) -> str:
    """Returns a description of what is exchanged, as far as it is the same on all ranks."""
    dtypes = [tensor.dtype.name for tensor in exchange.tensors]
    if exchange.ranks is not None:  # Other groups of ranks may differ in size.
        return ", ".join(dtypes)
    shapes = [t.shape[1:] if exchange.is_ragged else t.shape for t in exchange.tensors]
    return ", ".join(f"{dtype} {shape}" for dtype, shape in zip(dtypes, shapes, strict=True))
