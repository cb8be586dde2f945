"""The axes along which a strategy divides work and state."""

from typing import NamedTuple


class Mesh(NamedTuple):
    """Sizes of the axes of a job.

    Attributes:
        data: The number of replicas, each of which works on its own rows of a batch.
        pipeline: The number of stages of a replica, each with its own layers.
        shard: The number of parts of the optimizer's state, or of tables, over the ranks.
    """

    data: int
    pipeline: int
    shard: int

    def __str__(self) -> str:
        """Returns the sizes in words, such as "data 4 × pipeline 2 × shard 1"."""
        return f"data {self.data} × pipeline {self.pipeline} × shard {self.shard}"
