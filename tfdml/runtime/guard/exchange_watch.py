"""Watch over a process's exchanges: what it waits in, what its graphs exchange, begun and done."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfdml.runtime.guard.activity import Activity
from tfdml.runtime.hang_report.exchange_log import ExchangeLog
from tfdml.runtime.plain_words import in_plain_words

Results = TypeVar("Results")


class ExchangeWatch:
    """Notes each exchange of this process for the guard and for reports.

    Args:
        activity: Activity record of this process, which the guard reads.
        log: Record of what has begun and ended.
    """

    def __init__(self, activity: Activity, log: ExchangeLog):
        self._activity = activity
        self._log = log

    def exchange(
        self,
        kind: str,
        name: str,
        tensors: Sequence[tf.Tensor],
        words: Sequence[str],
        make: Callable[[], Results],
    ) -> Results:
        """Makes an exchange, watched.

        An eager one marks the process as waiting. One in a graph is noted when it is traced, and
        the graph notes each time that it begins and ends.

        Args:
            kind: Operation, such as "all_reduce".
            name: Name of the exchange.
            tensors: Tensors that this process sends.
            words: Descriptions of them, which are the same on all ranks.
            make: Function that makes the exchange.

        Returns:
            What `make` returns.
        """
        if tf.executing_eagerly():
            waiting = self._activity.waiting(f"{kind} of {name}")
            with in_plain_words(), waiting, self._log.eager(f"{name} ({kind})"):
                return make()
        self._activity.note_collective(f"{kind} of {name}", ", ".join(words))
        step = self._activity.tracing
        is_named = step is None or name.startswith(f"{step}/")
        noted = f"{name} ({kind})" if is_named else f"{step}/{name} ({kind})"
        results = make()
        self._log.note_in_graph(noted, tensors, tf.nest.flatten(results))
        return results
