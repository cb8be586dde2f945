"""Table on the first server in which each asynchronous step writes its results to a row.

Results returned by a worker would need separate messages to the chief. A row travels with the
step's other updates to the servers, and the chief reads many rows at once. A step that is repeated
because its worker died writes the same row again.
"""

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.strategies.parameter_server.remote_datasets import on_each_worker

_DEVICE = "/job:ps/replica:0/task:0/device:CPU:0"
ROW_SPEC = tf.TensorSpec([], tf.int64)


class ResultTable:
    """Table of the results of steps.

    Args:
        coordinator: TensorFlow's coordinator.
        rows: Number of rows.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, rows: int):
        # The workers hold all row numbers; otherwise the chief would send one with each task.
        self._numbers = [
            on_each_worker(coordinator, lambda _, n=n: tf.constant(n, tf.int64), ROW_SPEC)
            for n in range(rows)
        ]
        self._values: tf.Variable | None = None
        self._free = collections.deque(range(rows))

    def write(self, row: tf.Tensor, vector: tf.Tensor) -> None:
        """Writes a result, in a step's graph.

        Args:
            row: Number of the row: int64, shape `[]`.
            vector: The result: float64, with the same shape for all steps.
        """
        if self._values is None:
            with tf.init_scope(), tf.device(None), tf.device(_DEVICE):
                zeros = tf.zeros([len(self._numbers), *vector.shape], vector.dtype)
                self._values = unmanaged_variable(zeros)
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=self._values.handle, indices=row[None, None], updates=vector[None]
        )

    @property
    def is_full(self) -> bool:
        """Whether no row is free."""
        return not self._free

    def take_row(self) -> int:
        """Returns a free row, which stays taken until it is read."""
        return self._free.popleft()

    def on_workers(self, row: int) -> tf.distribute.experimental.coordinator.PerWorkerValues:
        """Returns a row's number as a value that every worker holds."""
        return self._numbers[row]

    def read(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Returns the results in some rows, and frees the rows."""
        if not rows:
            return []
        self._free.extend(rows)
        values = self._values.numpy()
        return [values[row] for row in rows]

    def clear(self) -> None:
        """Frees all rows."""
        self._free = collections.deque(range(len(self._numbers)))
