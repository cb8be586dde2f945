"""Gradient accumulation: each replica sums its gradients over steps, and exchanges them once."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


def accumulation_steps(model: keras.Model) -> int | None:
    """Returns the number of steps per update of a model's optimizer; None without accumulation."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "gradient_accumulation_steps", None)


class Accumulator:
    """Each replica's gradients accumulated since the last update, for one optimizer.

    Keras's own accumulators are mirrored variables updated in a branch of the replicas' graph,
    which `tf.distribute` does not allow. Here the whole step branches, outside of the replicas: in
    one branch the optimizer accumulates the gradients, in the other it exchanges and applies them.

    With loss scaling, the scaled gradients are accumulated: an overflow in any of the steps skips
    the whole update.

    Args:
        strategy: The strategy.
        optimizer: Built optimizer with `gradient_accumulation_steps`, without loss scaling.
    """

    def __init__(self, strategy: tf.distribute.Strategy, optimizer: keras.Optimizer):
        self.optimizer = optimizer
        self.steps = optimizer.gradient_accumulation_steps
        self.updates = True
        variables = strategy.extended.whole_variables(optimizer)
        # The division of each variable that is a table dealt to the ranks, else None.
        self.deals = [getattr(getattr(v, "ownership", None), "cut", None) for v in variables]
        with strategy.scope():
            self._sums = [_zeros(v.shape, v.dtype) for v in variables]
            # The sum of the replica's weights, if a rule compares the replicas' gradients.
            compares = strategy.extended.options.gradient_aggregation is not None
            self._weights = [_zeros([], tf.float64)] if compares else []
        self.deals += [None] * len(self._weights)

    @property
    def parts(self) -> list[list[tf.Variable]]:
        """The accumulators, for each variable those of this process's replicas."""
        return [list(getattr(v, "values", [v])) for v in [*self._sums, *self._weights]]

    def branch(self, step: Callable[[], Any]) -> Any:
        """Runs `step()` with `updates` set to whether this step ends with an update."""
        number = tf.convert_to_tensor(self.optimizer._iterations.value) + 1
        return tf.cond(
            number % self.steps == 0, lambda: self._run(step, True), lambda: self._run(step, False)
        )

    def _run(self, step: Callable[[], Any], updates: bool) -> Any:
        with self._updating(updates):
            return step()

    @contextlib.contextmanager
    def _updating(self, updates: bool) -> Iterator[None]:
        before, self.updates = self.updates, updates
        try:
            yield
        finally:
            self.updates = before

    def keep(
        self,
        gradients: Sequence,
        variables: Sequence[keras.Variable],
        weight: tf.Tensor | None = None,
    ) -> None:
        """Adds a replica's gradients, and their weight if it is needed, to its accumulators."""
        for gathered in self._weights:
            gathered.assign_add(weight)
        for gradient, variable in zip(gradients, variables, strict=True):
            gathered = self._gathered_variable(variable)
            if gradient is None:
                continue
            if _replaces(variable):
                gathered.assign(tf.maximum(gradient, gathered.read_value()))
            else:
                gathered.assign_add(tf.cast(gradient, gathered.dtype))
        if self.optimizer.use_ema:
            self.optimizer._update_model_variables_moving_average(list(variables))
        self.optimizer._iterations.assign_add(1)

    def take(self, gradients: Sequence, variables: Sequence[keras.Variable]) -> list:
        """Returns the mean over steps of a replica's gradients, and clears its accumulators."""
        means = list(gradients)
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            gathered = self._gathered_variable(variable)
            own = tf.cast(gradient, gathered.dtype)
            if _replaces(variable):
                means[index] = total = tf.maximum(own, gathered.read_value())
            else:
                total = gathered.read_value() + own
                means[index] = total / self.steps
            with tf.control_dependencies([total]):
                gathered.assign(tf.zeros_like(total))
        return means

    def take_weight(self, weight: tf.Tensor | None) -> tf.Tensor | None:
        """Returns the mean over steps of a replica's weight, and clears its accumulator."""
        for gathered in self._weights:
            weight = (gathered.read_value() + weight) / self.steps
            with tf.control_dependencies([weight]):
                gathered.assign(tf.zeros_like(weight))
        return weight

    def _gathered_variable(self, variable: keras.Variable) -> tf.Variable:
        return self._sums[self.optimizer._get_variable_index(variable)]


def _zeros(shape: Sequence[int], dtype: Any) -> tf.Variable:
    """Returns a variable of zeros of which each replica has its own, created in the scope."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


class SharedGatheredGradients:
    """Gradients that an optimizer accumulates outside of steps, the same on all replicas.

    Keras's own accumulators hold them, but Keras would update those in a branch inside a replica.

    Args:
        optimizer: Built optimizer with `gradient_accumulation_steps`, without loss scaling.
        variables: The variables that the gradients belong to.
    """

    def __init__(self, optimizer: keras.Optimizer, variables: Sequence[keras.Variable]):
        self._optimizer, self._variables = optimizer, variables
        self._sums = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables
        ]

    def is_whole(self) -> tf.Tensor:
        """Returns whether the next gradients complete an update: bool, shape `[]`."""
        number = tf.convert_to_tensor(self._optimizer._iterations) + 1
        return number % self._optimizer.gradient_accumulation_steps == 0

    def keep(self, gradients: Sequence) -> None:
        """Adds gradients to the accumulators."""
        for gathered, total in zip(self._sums, self._totals(gradients), strict=True):
            if total is not None:
                gathered.assign(total)
        if self._optimizer.use_ema:
            self._optimizer._update_model_variables_moving_average(self._variables)
        self._optimizer._iterations.assign_add(1)

    def take(self, gradients: Sequence) -> list:
        """Returns the mean of these and the accumulated gradients, and clears the accumulators."""
        steps = self._optimizer.gradient_accumulation_steps
        means = []
        for variable, total in zip(self._variables, self._totals(gradients), strict=True):
            replaces = total is None or _replaces(variable)
            means.append(total if replaces else total / steps)
        for gathered in self._sums:
            gathered.assign(tf.zeros_like(gathered))
        return means

    def _totals(self, gradients: Sequence) -> list:
        totals = []
        for gradient, gathered, variable in zip(
            gradients, self._sums, self._variables, strict=True
        ):
            add = tf.maximum if _replaces(variable) else tf.add
            dense = None if gradient is None else tf.cast(gradient, gathered.dtype)
            totals.append(None if dense is None else add(tf.convert_to_tensor(dense), gathered))
        return totals


def restart(optimizer: keras.Optimizer, number_before: tf.Tensor) -> None:
    """Rewinds the iterations of an optimizer that skipped its update, to restart accumulation.

    Args:
        optimizer: Optimizer with `gradient_accumulation_steps`, without loss scaling.
        number_before: Its iterations before the update: int, shape `[]`.
    """
    number = tf.convert_to_tensor(optimizer._iterations)
    first = number_before - (optimizer.gradient_accumulation_steps - 1)
    optimizer._iterations.assign(tf.where(number == number_before, first, number))


def _replaces(variable: keras.Variable) -> bool:
    """Returns whether a variable's gradient replaces its value, as for float8 scales."""
    return getattr(variable, "overwrite_with_gradient", False)
