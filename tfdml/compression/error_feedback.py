"""Error feedback: each process's memory of what its compressed gradients have left out."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

State = dict[str, tf.Tensor]


class Scales(NamedTuple):
    """Factors of a step: float32, shape `[]`.

    Attributes:
        loss: The loss scale, which the gradients contain.
        memory: Factor of all kept state, which corrects for a change of the learning rate.
    """

    loss: tf.Tensor
    memory: tf.Tensor


class Memory(abc.ABC):
    """Rule by which compression errors enter later steps: pure functions of one gradient.

    All state is in the units of the unscaled loss and proportional to gradients.

    Attributes:
        elementwise: Whether a value's memory depends on that value's gradients alone, so that the
            gradients may be cut or joined.
    """

    elementwise = True

    @abc.abstractmethod
    def init(self, shape: Sequence[int]) -> State:
        """Returns the initial state: float32 tensors by name."""

    @abc.abstractmethod
    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the value to send in this step, and the intermediate state.

        Args:
            gradient: This process's gradient: float32.
            state: The state after the last step.
        """

    @abc.abstractmethod
    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns the state after the step.

        Args:
            value: The value to send, from `compensate`.
            sent: The decoded value that was sent.
            state: The intermediate state, from `compensate`.
        """

    def init_plain(self, shape: Sequence[int]) -> State:
        """Returns the initial state of a gradient that is sent uncompressed: empty by default."""
        del shape
        return {}

    def after_sum(self, total: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the replacement of the sum of an uncompressed gradient, and the new state.

        Args:
            total: The sum: float32.
            state: The state after the last step; never empty.
        """
        return total, state


def compensated(
    memory: Memory,
    gradients: Sequence[tf.Tensor],
    states: Sequence[State],
    loss_scale: tf.Tensor,
    memory_scale: tf.Tensor,
) -> tuple[list[tf.Tensor], list[State]]:
    """Returns the values to send in this step, and the intermediate states.

    Args:
        memory: Rule by which compression errors enter.
        gradients: This process's gradients, of any floating dtype.
        states: Each gradient's state after the last step.
        loss_scale: The loss scale, which the gradients contain.
        memory_scale: Factor of all kept state.
    """
    values, middles = [], []
    for gradient, state in zip(gradients, states, strict=True):
        state = {key: value * memory_scale for key, value in state.items()}
        value, middle = memory.compensate(tf.cast(gradient, tf.float32) / loss_scale, state)
        values.append(value)
        middles.append(middle)
    return values, middles


class ErrorFeedback(Memory):
    """Memory that adds a step's compression error to the next gradient.

    Reference:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
        arXiv:1901.09847.
    """

    def init(self, shape: Sequence[int]) -> State:
        """Returns a residual of zeros; see `Memory`."""
        return {"residual": tf.zeros(shape)}

    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the gradient plus the residual; see `Memory`."""
        return gradient + state["residual"], {}

    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns the new residual; see `Memory`."""
        return {"residual": value - sent}


class NoMemory(Memory):
    """Memory that keeps nothing, for unbiased compressors."""

    def init(self, shape: Sequence[int]) -> State:
        """Returns an empty state; see `Memory`."""
        return {}

    def compensate(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Returns the gradient as it is; see `Memory`."""
        return gradient, {}

    def update(self, value: tf.Tensor, sent: tf.Tensor, state: State) -> State:
        """Returns an empty state; see `Memory`."""
        return {}
