"""Clock inside the train step for the time that each replica takes for its rows."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable


class ReplicaClock:
    """Observer that sums, on every rank, the seconds and rows of each replica of all ranks.

    A replica's time runs from the end of the previous step's message, which all ranks leave
    together, until its gradients are computed. So it includes all that delays the exchange of
    gradients on its rank, such as waiting for data. The replicas share their times in the message
    that carries the metrics. Left out are the first step of an epoch, which may be traced, compiled
    or follow validation, and batches that are smaller than others.

    Args:
        first_replica: Index of this process's first replica.
        local_replicas: The number of this process's replicas.
        num_replicas: The number of all replicas.
    """

    def __init__(self, first_replica: int, local_replicas: int, num_replicas: int):
        self._first, self._local, self._replicas = first_replica, local_replicas, num_replicas
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            # When the last message ended, and this process's replicas were ready; 0 if they were
            # not since.
            self._last, self._ready = zeros(), zeros(local_replicas)
            self._rows = zeros(local_replicas)
            self._sums = zeros(2, num_replicas)  # Seconds and rows of the counted steps.
            self._steps, self._largest = zeros(), zeros()  # Their number, and rows of a batch.

    def reset(self) -> None:
        """Clears the sums, and leaves out the next step."""
        for variable in (self._last, self._sums, self._steps, self._largest):
            variable.assign(tf.zeros_like(variable))

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch has arrived."""
        self._ready.assign(tf.zeros_like(self._ready))

    def note_gradients(self, replicas: Sequence[Sequence], rows: Sequence[tf.Tensor]) -> None:
        """Notes the time at which each of this process's replicas has computed its gradients.

        Args:
            replicas: Each local replica's gradients.
            rows: Each local replica's number of rows: int64, shape `[]`.
        """
        self._ready.assign(tf.stack([_time_after(gradients) for gradients in replicas]))
        self._rows.assign(tf.cast(tf.stack(list(rows)), tf.float64))

    def slots(self) -> tf.Tensor:
        """Returns this rank's seconds and rows at its replicas, else 0: float32, `[2, replicas]`.

        They are 0 if the step does not count.
        """
        ready, last = self._ready.read_value(), self._last.read_value()
        counts = (last > 0) & (tf.reduce_min(ready) > 0)
        own = tf.stack([ready - last, self._rows.read_value()])
        own = tf.cast(tf.where(counts, own, tf.zeros_like(own)), tf.float32)
        after = self._replicas - self._first - self._local
        return tf.pad(own, [[0, 0], [self._first, after]])

    def add(self, total: tf.Tensor) -> None:
        """Adds a step to the sums.

        Args:
            total: Each replica's seconds and rows: float32, shape `[2, replicas]`.
        """
        total = tf.cast(total, tf.float64)
        rows = tf.reduce_sum(total[1])
        counts = tf.reduce_all(total[1] > 0) & (rows >= self._largest.read_value())
        counts = tf.cast(counts, tf.float64)
        self._largest.assign(tf.maximum(self._largest.read_value(), rows))
        self._sums.assign_add(counts * total)
        self._steps.assign_add(counts)
        with tf.control_dependencies([total]):
            self._last.assign(tf.timestamp())

    def read(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns each replica's mean rows and seconds of a step; None if none was counted."""
        steps = self._steps.numpy()
        if not steps:
            return None
        seconds, rows = self._sums.numpy() / steps
        return rows, seconds


def _time_after(tensors: Sequence) -> tf.Tensor:
    """Returns the time at which tensors are computed, which a GPU's queue alone does not tell."""
    flat = tf.nest.flatten(list(tensors), expand_composites=True)
    with tf.control_dependencies(flat), tf.device("CPU:0"):
        # Behind all of them in the queue, a number is copied to the host, which waits for it.
        floats = [t for t in flat if t.dtype.is_floating]
        probes = [tf.cast(tf.reshape(t, [-1])[:1], tf.float64) for t in floats[:1]]
        with tf.control_dependencies(probes):
            return tf.timestamp()
