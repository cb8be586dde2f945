"""Who works on which rows of a global batch, and what datasets say that know it.

Strategies split batches by this, and datasets read by it: neither imports the other, and this
imports no TensorFlow.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """One process's replicas, which are consecutive, among all that share global batches.

    Each replica works on consecutive rows, in the order of the replicas. Their numbers of rows
    differ by one at most, and if there is a row, the first replica has one.

    Attributes:
        first_replica: The process's first replica.
        local_replicas: The number of its replicas.
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
        """The number of processes, which have equally many replicas."""
        return self.num_replicas // self.local_replicas

    def bounds(self, global_rows: Any) -> Any:
        """Returns where the rows of each of the process's replicas begin, and the last one's end.

        Args:
            global_rows: The batch's rows: a number, or a tensor of dtype int64 and shape `[]`.

        Returns:
            int64, shape `[local_replicas + 1]`: an array for a number, a tensor for a tensor.
        """
        replicas = np.arange(self.local_replicas + 1, dtype=np.int64) + self.first_replica
        return (replicas * global_rows + (self.num_replicas - 1)) // self.num_replicas

    def rows(self, global_rows: int) -> slice:
        """Returns which of a batch's rows the process works on."""
        bounds = self.bounds(global_rows)
        return slice(int(bounds[0]), int(bounds[-1]))

    def count(self, global_rows: int) -> int:
        """Returns on how many of a batch's rows the process works."""
        rows = self.rows(global_rows)
        return rows.stop - rows.start


@runtime_checkable
class OwnShareDataset(Protocol):
    """A `tf.data.Dataset` of which each process reads its own rows of every global batch.

    It has `AutoShardPolicy.OFF` then, and iterated over it yields these rows in groups of
    `global_batch_size`, as a plain dataset with that policy does which ends in `batch`.

    Attributes:
        global_batch_size: The rows of a global batch; None if this process reads all of them.
    """

    global_batch_size: int | None

    def own_shares(self, replicas: LocalReplicas) -> tuple[Any, int | None]:
        """Returns a dataset whose elements are a process's rows of one global batch each.

        Args:
            replicas: The process's replicas.

        Returns:
            The dataset, and the number of global batches of a whole epoch, None if it is not
            known. The process may have no rows of the last one.
        """
