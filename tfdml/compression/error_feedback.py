"""What a process keeps of its gradients between steps, because a step has left it out."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

State = dict[str, tf.Tensor]


class Scales(NamedTuple):
    """The factors of a step: float32, shape `[]`.

    Attributes:
        loss: The loss scale, which gradients contain.
        memory: The factor of all that is kept, for a learning rate that has changed.
    """

    loss: tf.Tensor
    memory: tf.Tensor


class Memory(abc.ABC):
    """How what has been left out enters later steps: pure functions, for one gradient each.

    All that is kept is in the units of the unscaled loss, and in proportion to gradients.
    """

    @abc.abstractmethod
    def init(self, shape: Sequence[int]) -> State:
        """Returns the state at the start: float32 tensors by name."""

    @abc.abstractmethod
    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns what is to be sent in this step, and the state in the middle of it.

        Args:
            gradient: This process's gradient: float32.
            state: What the last step has left.
        """

    @abc.abstractmethod
    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns the state after the step.

        Args:
            value: What was to be sent.
            sent: What was sent of it.
            state: The state in the middle of the step.
        """

    def init_plain(self, shape: Sequence[int]) -> State:
        """Returns the state for a gradient that goes uncompressed: mostly none."""
        del shape
        return {}

    def after_sum(self, total: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns what takes the place of the sum of an uncompressed gradient, and the new state.

        Args:
            total: The sum: float32.
            state: What the last step has left; never empty.
        """
        return total, state


def compensated(
    memory: Memory,
    gradients: Sequence[tf.Tensor],
    states: Sequence[State],
    loss_scale: tf.Tensor,
    memory_scale: tf.Tensor,
) -> tuple[list[tf.Tensor], list[State]]:
    """Returns what is to be sent of gradients in this step, and the states in the middle of it.

    Args:
        memory: How what has been left out enters.
        gradients: This process's gradients, of any floating dtype.
        states: What the last step has left of each.
        loss_scale: The loss scale, which gradients contain.
        memory_scale: The factor of all that is kept.
    """
    values, middles = [], []
    for gradient, state in zip(gradients, states, strict=True):
        state = {key: value * memory_scale for key, value in state.items()}
        value, middle = memory.compensate(tf.cast(gradient, tf.float32) / loss_scale, state)
        values.append(value)
        middles.append(middle)
    return values, middles


class ErrorFeedback(Memory):
    """Adds what has been left out to the next gradient.

    Reference:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
        arXiv:1901.09847.
    """

    def init(self, shape: Sequence[int]) -> State:
        """Returns zeros; see `Memory`."""
        return {"residual": tf.zeros(shape)}

    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the sum of both; see `Memory`."""
        return gradient + state["residual"], {}

    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns the difference; see `Memory`."""
        return {"residual": value - sent}


class NoMemory(Memory):
    """Keeps nothing: for what is right on average."""

    def init(self, shape: Sequence[int]) -> State:
        """Returns nothing; see `Memory`."""
        return {}

    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the gradient; see `Memory`."""
        return gradient, {}

    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns nothing; see `Memory`."""
        return {}
