"""Times within the graph of a step: when tensors exist, in variables of fixed size."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.runtime import host_clock


class Marks:
    """Times at which a step is at each of its marks, for a number of steps.

    Each mark has a variable on the processor with a slot for each step. Nothing but the step's end
    waits for these variables, and no mark waits for another one.

    Args:
        slots: The number of steps.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._times: dict[str, tf.Variable] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._slot = unmanaged_variable(tf.constant(-1))
        # TensorFlow runs operations that read the time one after another, in the order in which
        # they are traced: exchanges would wait for each other. A function that is given a resource
        # waits only for other uses of that.
        signature = [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int32)]
        self._write = tf.function(_write_time, input_signature=signature, autograph=False)

    def begin_step(self) -> None:
        """Goes on to the next slot; called in a step's graph once its batch has arrived."""
        self._slot.assign(tf.minimum(self._slot.read_value() + 1, self._slots - 1))

    def note(self, mark: str, tensors: Sequence[Any]) -> tf.Tensor:
        """Notes, in a step's graph, when all of some tensors exist.

        Args:
            mark: Name of the mark; noted once in a step.
            tensors: The tensors, sparse ones included.

        Returns:
            The time: float64, shape `[]`.
        """
        if mark not in self._times:
            with tf.init_scope(), tf.device("CPU:0"):
                self._times[mark] = unmanaged_variable(tf.zeros([self._slots], tf.float64))
        times = self._times[mark]
        flat = tf.nest.flatten(list(tensors), expand_composites=True)
        with tf.device(times.device), tf.control_dependencies(flat):
            return self._write(times.handle, self._slot.read_value())

    def passing(self, mark: str, tensors: Sequence[Any]) -> list:
        """Notes the same, and returns the tensors, which are used no earlier than that.

        So a busy processor, on which the note itself has to wait, makes nothing look shorter.

        Args:
            mark: Name of the mark.
            tensors: The tensors.
        """
        now = self.note(mark, tensors)

        def passed(tensor: tf.Tensor) -> tf.Tensor:
            # On another device it would be a copy.
            with tf.device(tensor.device) if tensor.device else contextlib.nullcontext():
                return tf.identity(tensor)

        with tf.control_dependencies([now]):
            return tf.nest.map_structure(passed, list(tensors), expand_composites=True)

    @property
    def steps(self) -> int:
        """The number of steps that have begun."""
        return int(self._slot.numpy()) + 1

    def read(self) -> dict[str, np.ndarray]:
        """Returns the times of each mark by slot, 0 where a step was not there: float64."""
        return {mark: times.numpy() for mark, times in self._times.items()}


def _write_time(times: tf.Tensor, slot: tf.Tensor) -> tf.Tensor:
    """Writes the present time into a slot of a variable; returns it: float64, `[]`.

    Args:
        times: The variable's handle.
        slot: The slot: int32, `[]`.
    """
    # The caller's control dependencies reach only what needs an argument: the time must need one.
    with tf.control_dependencies([slot]):
        now = host_clock.now_in_step()
    indices, updates = slot[tf.newaxis, tf.newaxis], now[tf.newaxis]
    tf.raw_ops.ResourceScatterNdUpdate(ref=times, indices=indices, updates=updates)
    return now
