"""State of compressed gradients in one step: values before it, and updates after its sums."""

from collections.abc import Sequence

import tensorflow as tf

from tfdml.collectives.aggregator import StepGradients
from tfdml.compression.compressor import Compressor
from tfdml.compression.error_feedback import Memory, Scales, State
from tfdml.compression.exchange.kept_state import KeptState

# A variable and its new value.
Commit = tuple[tf.Variable, tf.Tensor]


def can_be_compressed(gradient: tf.Tensor | tf.IndexedSlices, compressor: Compressor) -> bool:
    """Returns whether a compressor takes a gradient."""
    if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
        return False
    return compressor.takes(gradient.shape, gradient.dtype)


def step_scales(
    kept: KeptState, compressor: Compressor, gradients: StepGradients, commits: list[Commit]
) -> Scales:
    """Returns the step's factors, and adds its learning rate to the updates, for the next step.

    Args:
        kept: State of the aggregator.
        compressor: The compressor.
        gradients: The step's gradients.
        commits: Updates of the step, which get another one.
    """
    loss_scale, learning_rate = gradients.factors()
    loss = tf.constant(1.0) if loss_scale is None else tf.cast(loss_scale, tf.float32)
    if learning_rate is None or not compressor.biased:
        return Scales(loss, tf.constant(1.0))
    now = tf.cast(learning_rate, tf.float32)
    last = kept.scalar(f"learning_rate/{gradients.label}")
    before = last.read_value()
    commits.append((last, now))
    return Scales(loss, tf.where((before > 0) & (now > 0), before / now, 1.0))


def counted_step(kept: KeptState, commits: list[Commit]) -> tf.Variable:
    """Returns the number of the step, and adds counting it to the updates."""
    step = kept.scalar("step", tf.int32)
    commits.append((step, step + 1))
    return step


def memories_of(
    kept: KeptState, memory: Memory, gradients: StepGradients
) -> list[dict[str, tf.Variable]]:
    """Returns what the compressor's memory keeps of each gradient."""
    return [
        kept.gradient_state(name, memory.init, gradient.shape)
        for name, gradient in zip(gradients.names, gradients.values, strict=True)
    ]


def values_of(variables: dict[str, tf.Variable]) -> State:
    """Returns the values of kept variables, by name."""
    return {key: variable.read_value() for key, variable in variables.items()}


def commits_of(
    variables: Sequence[dict[str, tf.Variable]], values: Sequence[State]
) -> list[Commit]:
    """Returns the updates of kept variables to new values."""
    return [
        (variable, new[key])
        for own, new in zip(variables, values, strict=True)
        for key, variable in own.items()
    ]


def commit_if(condition: tf.Tensor, commits: Sequence[Commit]) -> None:
    """Assigns values to variables if the condition holds; a branch avoids copies."""

    def assign() -> None:
        for variable, value in commits:
            variable.assign(value, read_value=False)

    tf.cond(condition, assign, lambda: None)
