"""A collective without communication, for measuring the computation around exchanges."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.topology import Topology


class LoopbackCollective(Collective):
    """Collective that behaves as if all ranks sent the same tensors, instantly.

    Its all-reduce returns this rank's tensors without multiplying them by the number of ranks.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int):
        super().__init__(Topology(0, size, 0, size))

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns a collective that behaves the same with fewer ranks; see `Collective`."""
        return LoopbackCollective(len(ranks))

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Returns its input; see `Collective`."""
        return list(tensors)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Repeats its input for each rank; see `Collective`."""
        return tf.repeat(tensor, self.size, 0)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns its input; see `Collective`."""
        return tensor

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Returns its input; see `Collective`."""
        return tensor
