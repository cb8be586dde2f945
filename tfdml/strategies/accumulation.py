"""Gradients of several steps for one update: each replica adds up its own, exchanged once."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


def accumulation_steps(model: keras.Model) -> int | None:
    """Returns after how many steps a model's optimizer updates; None if after each."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "gradient_accumulation_steps", None)


class Accumulator:
    """What the replicas have gathered since the last update, for one optimizer.

    Keras's own accumulators are mirrored variables updated in a branch of the replicas' graph,
    which `tf.distribute` does not allow. Here the whole step branches, outside of the replicas: in
    one branch the optimizer keeps the gradients, in the other it exchanges and applies them.

    With loss scaling the scaled gradients are gathered: an overflow in any of the steps skips their
    update as a whole.

    Args:
        strategy: The strategy.
        optimizer: A built optimizer with `gradient_accumulation_steps`, without loss scaling.
    """

    def __init__(self, strategy: tf.distribute.Strategy, optimizer: keras.Optimizer):
        self.optimizer = optimizer
        self.steps = optimizer.gradient_accumulation_steps
        self.updates = True
        with strategy.scope():
            self._gathered = [
                tf.Variable(
                    tf.zeros(v.shape, v.dtype),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                for v in optimizer._trainable_variables
            ]

    def branch(self, step: Callable[[], Any]) -> Any:
        """Runs `step()`, in which `updates` says whether this step ends with an update."""
        number = tf.convert_to_tensor(self.optimizer._iterations.value) + 1
        return tf.cond(
            number % self.steps == 0, lambda: self._run(step, True), lambda: self._run(step, False)
        )

    def _run(self, step: Callable[[], Any], updates: bool) -> Any:
        with self._that(updates):
            return step()

    @contextlib.contextmanager
    def _that(self, updates: bool) -> Iterator[None]:
        before, self.updates = self.updates, updates
        try:
            yield
        finally:
            self.updates = before

    def keep(self, gradients: Sequence, variables: Sequence[keras.Variable]) -> None:
        """Adds a replica's gradients to what it has gathered."""
        for gradient, gathered in self._pairs(gradients, variables):
            gathered.assign_add(tf.cast(gradient, gathered.dtype))
        if self.optimizer.use_ema:
            self.optimizer._update_model_variables_moving_average(list(variables))
        self.optimizer._iterations.assign_add(1)

    def take(self, gradients: Sequence, variables: Sequence[keras.Variable]) -> list:
        """Returns the mean over the steps of a replica's gradients, and starts anew."""
        means = list(gradients)
        for gradient, gathered in self._pairs(gradients, variables):
            place = next(i for i, g in enumerate(gradients) if g is gradient)
            total = gathered.read_value() + tf.cast(gradient, gathered.dtype)
            means[place] = total / self.steps
            with tf.control_dependencies([total]):
                gathered.assign(tf.zeros_like(total))
        return means

    def restart(self, number_before: tf.Tensor) -> None:
        """Counts a skipped update as none: the next steps gather anew."""
        number = tf.convert_to_tensor(self.optimizer._iterations)
        first = number_before - (self.steps - 1)
        self.optimizer._iterations.assign(tf.where(number == number_before, first, number))

    def _pairs(self, gradients, variables) -> Iterator[tuple]:
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                yield gradient, self._gathered[self.optimizer._get_variable_index(variable)]
