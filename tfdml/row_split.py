"""Division of a global batch's rows among processes and replicas, and datasets that respect it.

Strategies split batches by it, and datasets read by it. It lets neither import the other, and does
not import TensorFlow.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import numpy as np

# Largest sum of integer weights: with up to 2 million rows in a batch, products fit in int64.
_LARGEST_SUM = 1 << 20


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns integers in proportion to positive numbers, by which rows can be divided exactly.

    Args:
        weights: Positive numbers; 0.6 and 0.2 give 3 and 1. If they have no such small integers,
            the result is rounded.
    """
    parts = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(part.denominator for part in parts))
    numbers = [int(part * scale) for part in parts]
    divisor = math.gcd(*numbers)
    total = sum(numbers)
    if total // divisor <= _LARGEST_SUM:
        return tuple(number // divisor for number in numbers)
    most = _LARGEST_SUM - len(numbers)
    return tuple(max(1, number * most // total) for number in numbers)


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """One process's consecutive replicas, among all replicas that share global batches.

    Each replica works on consecutive rows, in the order of the replicas. Without weights, their
    numbers of rows differ by at most one. With weights, they are in proportion to these; a batch
    with a row for each replica gives each at least one. If there is any row, the first replica has
    one.

    Attributes:
        first_replica: Index of the process's first replica.
        local_replicas: The number of the process's replicas.
        num_replicas: The number of all replicas.
        weights: Weights of all replicas: positive integers, see `integer_weights`, or an int64
            tensor of shape `[num_replicas]`; None for equal parts.
    """

    first_replica: int = 0
    local_replicas: int = 1
    num_replicas: int = 1
    weights: Any = None

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
            int64, shape `[local_replicas + 1]`: an array for numbers, a tensor for tensors.
        """
        replicas = np.arange(self.local_replicas + 1, dtype=np.int64) + self.first_replica
        if self.weights is None:
            return (replicas * global_rows + (self.num_replicas - 1)) // self.num_replicas
        is_tuple = isinstance(self.weights, tuple)
        weights = np.array(self.weights, np.int64) if is_tuple else self.weights
        # Which replicas come before each bound; the last column has all of them.
        ends = np.append(replicas, self.num_replicas)
        before = (np.arange(self.num_replicas)[:, np.newaxis] < ends).astype(np.int64)
        total = (weights[np.newaxis] @ before)[0][-1]
        # A row for each replica if there are as many; the other rows in proportion to what each
        # replica's part exceeds that row by.
        one_each = 1 - _at_least_0(1 - global_rows // self.num_replicas)
        excess = _at_least_0(weights * global_rows - one_each * total)
        sums = (excess[np.newaxis] @ before)[0]
        others = global_rows - one_each * self.num_replicas
        divisor = 1 + _at_least_0(sums[-1] - 1)
        return replicas * one_each + (sums[:-1] * others + (divisor - 1)) // divisor

    def rows(self, global_rows: int) -> slice:
        """Returns the slice of a batch's rows on which the process works."""
        bounds = self.bounds(global_rows)
        return slice(int(bounds[0]), int(bounds[-1]))

    def count(self, global_rows: int) -> int:
        """Returns the number of a batch's rows on which the process works."""
        rows = self.rows(global_rows)
        return rows.stop - rows.start


def _at_least_0(values: Any) -> Any:
    """Returns `max(values, 0)`, by operators that arrays and tensors share."""
    return (values + abs(values)) // 2


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
