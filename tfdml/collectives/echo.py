"""A rank that hears its own echo: for measuring what is done around exchanges."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.topology import Topology


class EchoCollective(Collective):
    """As if all ranks sent the same, in no time; sums are this rank's own part.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int):
        super().__init__(Topology(0, size, 0, size))

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Returns what it is given; see `Collective`."""
        return list(tensors)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Repeats what it is given; see `Collective`."""
        return tf.repeat(tensor, self.size, 0)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns what it is given; see `Collective`."""
        return tensor

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Returns what it is given; see `Collective`."""
        return tensor
