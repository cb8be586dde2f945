"""Division of a global batch's rows among processes and replicas, and datasets that respect it.

Strategies split batches by it, and datasets read by it. It lets neither import the other, and does
not import TensorFlow.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """One process's consecutive replicas, among all replicas that share global batches.

    Each replica works on consecutive rows, in the order of the replicas. Their numbers of rows
    differ by at most one, and if there is any row, the first replica has one.

    Attributes:
        first_replica: Index of the process's first replica.
        local_replicas: The number of the process's replicas.
        num_replicas: The number of all replicas.
    """

    first_replica: int = 0
    local_replicas: int = 1
    num_replicas: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether the process works on all rows."""
        return self.local_replicas == self.num_replicas

    @property
    def num_processes(self) -> int:
        """The number of processes, which all have the same number of replicas."""
        return self.num_replicas // self.local_replicas

    def bounds(self, global_rows: Any) -> Any:
        """Returns the first row of each of the process's replicas, and the last one's end.

        Args:
            global_rows: Rows of the global batch: a number, or an int64 tensor of shape `[]`.

        Returns:
            int64, shape `[local_replicas + 1]`: an array for a number, a tensor for a tensor.
        """
        replicas = np.arange(self.local_replicas + 1, dtype=np.int64) + self.first_replica
        return (replicas * global_rows + (self.num_replicas - 1)) // self.num_replicas

    def rows(self, global_rows: int) -> slice:
        """Returns the slice of a batch's rows on which the process works."""
        bounds = self.bounds(global_rows)
        return slice(int(bounds[0]), int(bounds[-1]))

    def count(self, global_rows: int) -> int:
        """Returns the number of a batch's rows on which the process works."""
        rows = self.rows(global_rows)
        return rows.stop - rows.start


@runtime_checkable
class OwnShareDataset(Protocol):
    """A `tf.data.Dataset` from which each process reads only its own rows of every global batch.

    Its policy is `AutoShardPolicy.OFF`, and iterating over it yields these rows in groups of
    `global_batch_size`, like a plain dataset with that policy that ends in `batch`.

    Attributes:
        global_batch_size: Rows of a global batch; None if this process reads all of them.
    """

    global_batch_size: int | None

    def local_shares(self, replicas: LocalReplicas) -> tuple[Any, int | None]:
        """Returns a dataset whose elements are the process's rows of one global batch each.

        Args:
            replicas: The process's replicas.

        Returns:
            The dataset, and the number of global batches of a whole epoch, None if unknown. The
            process may have no rows of the last one.
        """
