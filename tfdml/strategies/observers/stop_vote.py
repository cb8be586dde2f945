"""Vote by which one rank asks all to stop; it travels in the message that carries the metrics."""

import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable


class StopVote:
    """Observer by which all ranks know, after each step, whether one of them asked to stop."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._own = unmanaged_variable(tf.zeros([1]))
            self._all = unmanaged_variable(tf.zeros([1]))

    def request(self) -> None:
        """Asks to stop; the next step informs the other ranks."""
        self._own.assign([1.0])

    @property
    def requested(self) -> bool:
        """Whether this rank has asked to stop."""
        return bool(self._own.numpy()[0] > 0)

    @property
    def decided(self) -> bool:
        """Whether a rank had asked to stop before the last step: the same on all ranks."""
        return bool(self._all.numpy()[0] > 0)

    def reset(self) -> None:
        """Clears all requests to stop."""
        self._own.assign([0.0])
        self._all.assign([0.0])

    def begin(self) -> None:
        """Does nothing when a step begins."""

    def slots(self) -> tf.Tensor:
        """Returns 1 if this rank asked to stop, else 0: float32, shape `[1]`."""
        return self._own.read_value()

    def add(self, wishes: tf.Tensor) -> None:
        """Records the number of ranks that asked to stop: float32, shape `[1]`."""
        self._all.assign_add(wishes)
