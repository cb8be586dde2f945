"""Observers around a single replica's train step, which is Keras's own.

Steps of several replicas are a `MetricStep`, which calls the observers itself. Here the clock and
the watch of the gradients stand around Keras's step, also in plain Keras. XLA-compiled code cannot
read a clock or assign their variables, so only what they observe is compiled.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.fit_session import get_session
from tfdml.strategies.input.local_batch import rows_or_zero
from tfdml.strategies.keras_seam.current import is_tfdml_strategy
from tfdml.strategies.keras_seam.step.compiled import without_jit_compile
from tfdml.strategies.observers.gradient_watch import GradientWatch
from tfdml.strategies.observers.step_clock import StepClock
from tfdml.strategies.replicas.global_step import GlobalStep
from tfdml.strategies.traced import traced, tracing


@dataclasses.dataclass
class UpdateObservation:
    """Observed quantities of the updates of a step.

    Attributes:
        clock: The session's clock.
        watch: The session's watch of the gradients, if any.
        is_due: Whether the step takes the gradients' norm: bool, shape `[]`.
        squared: Squared norm of each update's gradients.
    """

    clock: StepClock
    watch: GradientWatch | None
    is_due: tf.Tensor
    squared: list[tf.Tensor] = dataclasses.field(default_factory=list)


class ObservedStep(GlobalStep):
    """Train step of a single replica, inside the session's observers.

    Under a strategy of tfdml it is called outside of the replica, as every `GlobalStep` is: code
    that XLA compiles must contain the whole replica, because an update leaves it for a moment.

    Args:
        model: The model.
        step: Its `train_step`.
    """

    def __init__(self, model: keras.Model, step: Callable):
        self.model, self.name = model, step.__name__
        self.__name__ = step.__name__
        self._step = step
        self._jit_compile = model.jit_compile
        self._run_step = self._with_squared_norm
        if self._jit_compile:
            self._run_step = tf.function(self._run_step, jit_compile=True, autograph=False)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Any) -> Any:
        """Takes the step on a batch; returns Keras's logs."""
        session = get_session(self.model)
        clock, watch = session.observer(StepClock), session.observer(GradientWatch)
        # Only after the batch has arrived: at the end of the data nothing may change.
        tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies(tensors):
            clock.begin()
            if watch is not None:
                watch.begin_step()
        clock.note_batch(rows_or_zero(batch))
        is_due = tf.constant(False) if watch is None else watch.is_due()
        outputs, squared = self._run_step(batch, is_due)
        results = tf.nest.flatten(outputs, expand_composites=True)
        if self._jit_compile:
            clock.note_gradients(results)
        with tf.control_dependencies(results):
            clock.add(clock.slots())
        if watch is not None:
            watch.note_squared_norm(squared)
            watch.add(watch.slots())
        return outputs

    def _with_squared_norm(self, batch: Any, is_due: tf.Tensor) -> tuple[Any, tf.Tensor]:
        session = get_session(self.model)
        observation = UpdateObservation(
            session.observer(StepClock), session.observer(GradientWatch), is_due
        )

        # Each replica traces in a thread of its own, so the state is set in it.
        def in_replica(data: Any) -> Any:
            with tracing(observed=observation, compiled_whole=self._jit_compile):
                return self._step(data)

        if is_tfdml_strategy(self.model.distribute_strategy):
            outputs = self.model.distribute_strategy.run(in_replica, args=(batch,))
        else:
            outputs = in_replica(batch)
        return outputs, tf.add_n([tf.zeros([], tf.float64), *observation.squared])


def make_observed(keras_make: Callable, model: keras.Model, step: Callable) -> Callable:
    """Returns Keras's function of a single replica's step, inside the session's observers if any.

    Args:
        keras_make: Keras's own `_make_function`.
        model: The model.
        step: Its `train_step` or `test_step`.
    """
    is_timed = get_session(model).observer(StepClock) is not None
    is_single = model.distribute_strategy.num_replicas_in_sync == 1
    if step.__name__ != "train_step" or not (is_timed and is_single):
        return keras_make(model, step)
    observed_step = ObservedStep(model, step)
    is_ours = is_tfdml_strategy(model.distribute_strategy)
    with without_jit_compile(model):
        # Other strategies take functions alone.
        return keras_make(model, observed_step if is_ours else observed_step.__call__)


@contextlib.contextmanager
def observed_update(optimizer: keras.Optimizer, gradients: Sequence) -> Iterator[None]:
    """Context manager: an optimizer of a single replica makes an update.

    An inner optimizer that is called within is not observed again.

    Args:
        optimizer: The optimizer that was called, with or without a loss scale around it.
        gradients: The replica's gradients.
    """
    observation: UpdateObservation | None = traced().observed
    if observation is None:
        yield
        return
    present = [g for g in gradients if g is not None]
    if traced().compiled_whole:
        # XLA cannot add up repeated rows of a sparse gradient.
        present = [tf.convert_to_tensor(g) for g in present]
    else:
        observation.clock.note_gradients(present)
    if observation.watch is not None:
        scale = getattr(optimizer, "dynamic_scale", None)
        scale = None if scale is None else tf.convert_to_tensor(scale)
        squared = observation.watch.squared_norm(present, [], scale, observation.is_due)
        observation.squared.append(squared)
    with tracing(observed=None):
        yield
