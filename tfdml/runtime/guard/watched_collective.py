"""Collective that reports its waits and the tensors in its graphs, for the guard to compare."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.guard.activity import Activity
from tfdml.runtime.guard.exchange_watch import ExchangeWatch


class WatchedCollective(Collective):
    """Wrapper that has every operation watched, and delegates it.

    Args:
        collective: Collective that moves the tensors.
        activity: Activity record of this process, which the guard reads.
        watch: Watch over this process's exchanges.
        is_whole: Whether all processes take part with tensors of equal shapes. Subgroups may differ
            in size, so of their tensors only the dtypes are recorded.
    """

    def __init__(
        self,
        collective: Collective,
        activity: Activity,
        watch: ExchangeWatch,
        is_whole: bool = True,
    ):
        super().__init__(collective.topology)
        self._collective = collective
        self._activity = activity
        self._watch = watch
        self._is_whole = is_whole

    @property
    def concurrent_with_steps(self) -> Collective:
        """Collective for background exchanges, unwatched: activities are the main thread's."""
        return self._collective.concurrent_with_steps

    @property
    def in_any_order(self) -> Collective | None:
        """Watched collective whose operations have no order; see `Collective`."""
        collective = self._collective.in_any_order
        if collective is None or collective is self._collective:
            return collective and self
        return self._like_this(collective, self._is_whole)

    def on(self, device: str | None) -> Collective:
        """Returns the watched collective of a device; see `Collective`."""
        collective = self._collective.on(device)
        if collective is self._collective:
            return self
        return self._like_this(collective, self._is_whole)

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns the watched collective between some of the processes; see `Collective`."""
        if len(ranks) == self.size:
            return self
        return self._like_this(self._collective.subgroup(ranks), is_whole=False)

    def _like_this(self, collective: Collective, is_whole: bool) -> "WatchedCollective":
        return WatchedCollective(collective, self._activity, self._watch, is_whole)

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """Context manager: this process waits for the others in `what`."""
        return self._activity.waiting(what)

    def noted(self, tensors: Sequence[Any], mark: str) -> list:
        """Notes in a recorded step when tensors exist; see `Collective`."""
        return self._collective.noted(tensors, mark)

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        return self._watch.exchange(
            "all_reduce",
            name,
            tensors,
            [self._in_words(t, t.shape) for t in tensors],
            functools.partial(self._collective.all_reduce, tensors, name),
        )

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        return self._watch.exchange(
            "all_gather",
            name,
            [tensor],
            [self._in_words(tensor, tensor.shape[1:])],
            functools.partial(self._collective.all_gather, tensor, name),
        )

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        return self._watch.exchange(
            "all_to_all",
            name,
            [tensor],
            [self._in_words(tensor, tensor.shape)],
            functools.partial(self._collective.all_to_all, tensor, name),
        )

    def all_to_all_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Sends consecutive rows of the tensor to each process; see `Collective`."""
        return self._watch.exchange(
            "all_to_all",
            name,
            [tensor],
            [self._in_words(tensor, tensor.shape)],
            functools.partial(self._collective.all_to_all_rows, tensor, counts, name),
        )

    def all_to_all_ragged(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends consecutive rows of the tensor to each process; see `Collective`."""
        return self._watch.exchange(
            "all_to_all",
            name,
            [tensor],
            [self._in_words(tensor, tensor.shape[1:])],
            functools.partial(self._collective.all_to_all_ragged, tensor, counts, name),
        )

    def all_gather_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        return self._watch.exchange(
            "all_gather",
            name,
            [tensor],
            [self._in_words(tensor, tensor.shape[1:])],
            functools.partial(self._collective.all_gather_rows, tensor, counts, name),
        )

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every process the tensor of `root`; see `Collective`."""
        return self._watch.exchange(
            "broadcast",
            name,
            [tensor],
            [self._in_words(tensor, tensor.shape)],
            functools.partial(self._collective.broadcast, tensor, name, root),
        )

    def _in_words(self, tensor: tf.Tensor, shape: tf.TensorShape) -> str:
        return f"{tensor.dtype.name} {shape}" if self._is_whole else tensor.dtype.name
