"""Collective that notes when the exchanges of a recorded step begin and end."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.timing.time_recorder import TimeRecorder
from tfdml.timeline.recording import BEGIN, END


class TimedCollective(Collective):
    """Wrapper that marks operations in the graphs of recorded steps; elsewhere it only delegates.

    An exchange begins when this process's tensors exist, and ends when its result does: waiting for
    other processes, and for exchanges before it, is a part of it.

    Args:
        collective: Collective that moves the tensors.
        recorder: TimeRecorder of this process.
        ranks: Ranks of the job between which it moves them; None for all.
    """

    def __init__(
        self, collective: Collective, recorder: TimeRecorder, ranks: Sequence[int] | None = None
    ):
        super().__init__(collective.topology)
        self._collective = collective
        self._recorder = recorder
        self._ranks = ranks

    @property
    def concurrent_with_steps(self) -> Collective:
        """Collective for background exchanges, which are in no step's graph."""
        return self._collective.concurrent_with_steps

    @property
    def in_any_order(self) -> Collective | None:
        """Timed collective whose operations have no order; see `Collective`."""
        collective = self._collective.in_any_order
        return None if collective is None else self._like(collective)

    def on(self, device: str | None) -> Collective:
        """Returns the timed collective of a device; see `Collective`."""
        return self._like(self._collective.on(device))

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns the timed collective between some of the processes; see `Collective`."""
        if len(ranks) == self.size:
            return self
        return TimedCollective(self._collective.subgroup(ranks), self._recorder, list(ranks))

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """Context manager: this process waits for the others in `what`."""
        return self._collective.waiting(what)

    def noted(self, tensors: Sequence[Any], mark: str) -> list:
        """Notes in a recorded step when tensors exist; see `Collective`."""
        return self._recorder.passing(mark, tensors)

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        move = lambda own: self._collective.all_reduce(own, name)  # noqa: E731
        return self._timed("all_reduce", name, tensors, move)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        move = lambda own: [self._collective.all_gather(own[0], name)]  # noqa: E731
        return self._timed("all_gather", name, [tensor], move)[0]

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        move = lambda own: [self._collective.all_to_all(own[0], name)]  # noqa: E731
        return self._timed("all_to_all", name, [tensor], move)[0]

    def all_to_all_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Sends consecutive rows of the tensor to each process; see `Collective`."""
        move = lambda own: [self._collective.all_to_all_rows(own[0], counts, name)]  # noqa: E731
        return self._timed("all_to_all", name, [tensor], move)[0]

    def all_to_all_ragged(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends consecutive rows of the tensor to each process; see `Collective`."""
        move = lambda own: list(self._collective.all_to_all_ragged(*own, name))  # noqa: E731
        rows, received = self._timed("all_to_all", name, [tensor, counts], move)
        return rows, received

    def all_gather_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        move = lambda own: [self._collective.all_gather_rows(own[0], counts, name)]  # noqa: E731
        return self._timed("all_gather", name, [tensor], move)[0]

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every process the tensor of `root`; see `Collective`."""
        move = lambda own: [self._collective.broadcast(own[0], name, root)]  # noqa: E731
        return self._timed("broadcast", name, [tensor], move)[0]

    def _like(self, collective: Collective) -> Collective:
        if collective is self._collective:
            return self
        return TimedCollective(collective, self._recorder, self._ranks)

    def _timed(
        self, operation: str, name: str, tensors: Sequence[tf.Tensor], move: Callable
    ) -> list[tf.Tensor]:
        if not self._recorder.is_in_step:
            return move(tensors)
        self._recorder.describe_exchange(
            name, operation=operation, bytes=_nbytes(tensors), ranks=self._ranks
        )
        own = self._recorder.passing(f"{name}:{BEGIN}", tensors)
        return self._recorder.passing(f"{name}:{END}", move(own))


def _nbytes(tensors: Sequence[tf.Tensor]) -> int | None:
    """Returns the bytes of tensors, None if a shape is not known."""
    counts = [tensor.shape.num_elements() for tensor in tensors]
    if None in counts:
        return None
    return sum(n * t.dtype.size for n, t in zip(counts, tensors, strict=True))
