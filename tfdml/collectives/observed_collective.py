"""Collective whose exchanges are observed, for reports on hangs and for timelines."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective


@dataclasses.dataclass
class ObservedExchange:
    """An exchange that is made eagerly, or in a graph that is being traced.

    Attributes:
        operation: Operation, such as "all_reduce".
        name: Name of the exchange.
        tensors: Tensors that this process sends; a listener may replace them before.
        ranks: Ranks of the job that take part; None for all.
        is_ragged: Whether the first axis of the tensors may have another length on each rank.
        results: Tensors that it returns; a listener may replace them after.
    """

    operation: str
    name: str
    tensors: Sequence[tf.Tensor]
    ranks: Sequence[int] | None = None
    is_ragged: bool = False
    results: Sequence[tf.Tensor] = ()

    def make(
        self,
        move: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
        listeners: Sequence["ExchangeListener"],
    ) -> Sequence[tf.Tensor]:
        """Makes the exchange, and returns its results.

        Args:
            move: Function that exchanges tensors.
            listeners: Listeners, the outermost first.
        """
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener.exchanging(self))
            self.results = move(self.tensors)
        return self.results


class ExchangeListener:
    """Listener to the exchanges of a process; by default it does nothing."""

    def exchanging(self, exchange: ObservedExchange) -> contextlib.AbstractContextManager:
        """Context manager: an exchange is made."""
        del exchange
        return contextlib.nullcontext()

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """Context manager: this process waits for the others in `what`."""
        del what
        return contextlib.nullcontext()

    def noted(self, tensors: Sequence[Any], mark: str) -> list:
        """Returns the same tensors, having noted when they exist; see `Collective`."""
        del mark
        return list(tensors)


class ObservedCollective(Collective):
    """Wrapper that has listeners observe every exchange of a collective.

    Args:
        collective: Collective that moves the tensors.
        listeners: Listeners, the outermost first.
        ranks: Ranks of the job between which it moves them; None for all.
    """

    def __init__(
        self,
        collective: Collective,
        listeners: Sequence[ExchangeListener],
        ranks: Sequence[int] | None = None,
    ):
        super().__init__(collective.topology)
        self._collective = collective
        self._listeners = listeners
        self._ranks = ranks

    @property
    def concurrent_with_steps(self) -> Collective:
        """Collective for background exchanges, unobserved: listeners know the main thread's."""
        return self._collective.concurrent_with_steps

    @property
    def in_any_order(self) -> Collective | None:
        """Observed collective whose operations have no order; see `Collective`."""
        collective = self._collective.in_any_order
        return None if collective is None else self._like_this(collective)

    def on(self, device: str | None) -> Collective:
        """Returns the observed collective of a device; see `Collective`."""
        return self._like_this(self._collective.on(device))

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns the observed collective between some of the processes; see `Collective`."""
        if len(ranks) == self.size:
            return self
        return ObservedCollective(self._collective.subgroup(ranks), self._listeners, list(ranks))

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """Context manager: this process waits for the others in `what`."""
        stack = contextlib.ExitStack()
        for listener in self._listeners:
            stack.enter_context(listener.waiting(what))
        return stack

    def noted(self, tensors: Sequence[Any], mark: str) -> list:
        """Notes in a recorded step when tensors exist; see `Collective`."""
        for listener in self._listeners:
            tensors = listener.noted(tensors, mark)
        return list(tensors)

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        move = lambda own: self._collective.all_reduce(own, name)  # noqa: E731
        return list(self._observed("all_reduce", name, tensors, move))

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        move = lambda own: [self._collective.all_gather(*own, name)]  # noqa: E731
        return self._observed("all_gather", name, [tensor], move, is_ragged=True)[0]

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        move = lambda own: [self._collective.all_to_all(*own, name)]  # noqa: E731
        return self._observed("all_to_all", name, [tensor], move)[0]

    def all_to_all_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Sends consecutive rows of the tensor to each process; see `Collective`."""
        move = lambda own: [self._collective.all_to_all_rows(*own, counts, name)]  # noqa: E731
        return self._observed("all_to_all", name, [tensor], move)[0]

    def all_to_all_ragged(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends consecutive rows of the tensor to each process; see `Collective`."""
        move = lambda own: self._collective.all_to_all_ragged(*own, name)  # noqa: E731
        rows, received = self._observed("all_to_all", name, [tensor, counts], move, is_ragged=True)
        return rows, received

    def all_gather_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        move = lambda own: [self._collective.all_gather_rows(*own, counts, name)]  # noqa: E731
        return self._observed("all_gather", name, [tensor], move, is_ragged=True)[0]

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every process the tensor of `root`; see `Collective`."""
        move = lambda own: [self._collective.broadcast(*own, name, root)]  # noqa: E731
        return self._observed("broadcast", name, [tensor], move)[0]

    def _like_this(self, collective: Collective) -> Collective:
        if collective is self._collective:
            return self
        return ObservedCollective(collective, self._listeners, self._ranks)

    def _observed(
        self,
        operation: str,
        name: str,
        tensors: Sequence[tf.Tensor],
        move: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
        is_ragged: bool = False,
    ) -> Sequence[tf.Tensor]:
        exchange = ObservedExchange(operation, name, tensors, self._ranks, is_ragged)
        return exchange.make(move, self._listeners)
