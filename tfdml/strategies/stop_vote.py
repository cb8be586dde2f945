"""One rank asks all to stop: its wish goes with the metrics, in the message that is sent anyway."""

import tensorflow as tf

from tfdml.collectives.own_variable import own_variable


class StopVote:
    """After each step all ranks know alike whether one of them wishes to stop."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._own = own_variable(tf.zeros([1]))
            self._all = own_variable(tf.zeros([1]))

    def wish(self) -> None:
        """This rank asks to stop; the next step tells the others."""
        self._own.assign([1.0])

    @property
    def decided(self) -> bool:
        """Whether a rank had asked to stop before the last step: the same on all ranks."""
        return bool(self._all.numpy()[0] > 0)

    def reset(self) -> None:
        """Starts anew."""
        self._own.assign([0.0])
        self._all.assign([0.0])

    def begin(self) -> None:
        """A step begins: there is nothing to note."""

    def slots(self) -> tf.Tensor:
        """Returns this rank's wish: float32, `[1]`."""
        return self._own.read_value()

    def add(self, wishes: tf.Tensor) -> None:
        """Takes up the number of ranks that wish to stop: float32, `[1]`."""
        self._all.assign_add(wishes)
