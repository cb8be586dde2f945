"""A collective that says what it waits for: the guard shows it, and finds ranks that disagree."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.place import Place


class WatchedCollective(Collective):
    """Passes every operation on; while one is executed eagerly, the process waits in it.

    Args:
        collective: What moves the tensors.
        place: Where it is said.
    """

    def __init__(self, collective: Collective, place: Place):
        super().__init__(collective.topology)
        self._collective = collective
        self._place = place

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        with self._waiting(f"all_reduce of {name}"):
            return self._collective.all_reduce(tensors, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        with self._waiting(f"all_gather of {name}"):
            return self._collective.all_gather(tensor, name)

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every process the tensor of `root`; see `Collective`."""
        with self._waiting(f"broadcast of {name}"):
            return self._collective.broadcast(tensor, name, root)

    def _waiting(self, what: str) -> contextlib.AbstractContextManager:
        return self._place.waiting(what) if tf.executing_eagerly() else contextlib.nullcontext()
