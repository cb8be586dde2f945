"""What a worker runs: a model's step on a batch, with the results in one vector."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.parameter_server.packing import pack
from tfdml.strategies.parameter_server.result_table import ROW_SPEC, ResultTable
from tfdml.strategies.parameter_server.step_scope import StepScope
from tfdml.strategies.replica_step import ReplicaStep, Result, metric_variables
from tfdml.strategies.share import unpacked, without_optionals

_STREAM = tf.TensorSpec([], tf.int64)


class WorkerStep:
    """A model's train, test or predict step as functions for workers.

    Args:
        model: The model.
        step: Its method.

    Attributes:
        own_names: What the step returns besides metrics' results; known once a function was made.
    """

    def __init__(self, model: keras.Model, step: Callable):
        self._model = model
        self._step = ReplicaStep(model, step)
        self._functions: dict[Any, Callable] = {}
        self.own_names: list[str] = []

    @property
    def metric_results(self) -> dict[str, Result]:
        """What the step returns of metrics, by key; known once a function was made."""
        return self._step.results

    def on_iterator(self, iterators: Any, table: ResultTable) -> Callable:
        """Returns a function that takes `steps_per_execution` steps on a worker's own data.

        Args:
            iterators: An iterator on each worker.
            table: What is given the sum of what the steps add to the metrics, and the last one's
                own results.

        Returns:
            A concrete function of an iterator, a stream of random numbers and a row of the table.
        """
        steps = self._model.steps_per_execution

        def run(iterator, stream, row):
            vector = self.results(next(iterator), stream)
            own = len(self.own_names)

            def another(step, before):
                after = self.results(next(iterator), stream)
                return step + 1, before * added + after

            if steps > 1:
                # Of the step's own results the last one's are kept.
                metrics = vector.shape[0] - own
                added = tf.constant([1.0] * metrics + [0.0] * own, vector.dtype)
                _, vector = tf.while_loop(lambda step, _: step < steps, another, [1, vector])
            table.write(row, vector)

        spec = iterators._values[0]._type_spec
        return self._concrete(run, spec, _STREAM, ROW_SPEC)

    def on_batch(self, batch: Any) -> Callable:
        """Returns a function that takes one step on a batch which it is given.

        Args:
            batch: A batch.

        Returns:
            A concrete function of such a batch, of any number of rows, and a stream. For
            `predict_step` it returns what that returns, else the results as one vector.
        """
        specs = tf.nest.map_structure(any_rows, batch)
        key = str(specs)
        if key not in self._functions:
            run = self.outputs if self._step.__name__ == "predict_step" else self.results
            self._functions[key] = self._concrete(run, specs, _STREAM)
        return self._functions[key]

    def _concrete(self, run: Callable, *specs: Any) -> Callable:
        with self._model.distribute_strategy.scope():
            return tf.function(run, autograph=False).get_concrete_function(*specs)

    def outputs(self, batch: Any, stream: tf.Tensor) -> Any:
        """Returns what the model's step returns."""
        with StepScope([], stream):
            return self._step(given(batch))

    def results(self, batch: Any, stream: tf.Tensor) -> tf.Tensor:
        """Takes a step in the graph; returns what it adds to the metrics, and its own results."""
        metrics = metric_variables(self._model)
        own = [(v, tf.zeros(v.shape, v.dtype)) for v in metrics]
        with StepScope(own, stream, scale_of(self._model)) as scope:
            extra = own_numbers(self._step, self._step(given(batch)))
        self.own_names = list(extra)
        return pack([scope.get_current_value(v) for v in metrics] + list(extra.values()))


def given(batch: Any) -> Any:
    """Returns what a step is given of a batch that came as a function's arguments."""
    return without_optionals(unpacked(batch) if isinstance(batch, tuple) else batch)


def own_numbers(step: ReplicaStep, outputs: Any) -> dict[str, tf.Tensor]:
    """Returns the numbers that a step returned besides metrics' results.

    Raises:
        ValueError: If one was computed from a metric's result.
    """
    if not isinstance(outputs, dict):
        return {"loss": tf.reduce_mean(outputs)} if tf.is_tensor(outputs) else {}
    step.refuse_derived()
    return {
        name: tf.convert_to_tensor(value)
        for name, value in outputs.items()
        if name not in step.results and not isinstance(value, dict)
    }


def scale_of(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns the loss scale, and the steps since it changed, as they are when a step begins.

    Other workers may change both in the middle: the loss and its gradients have one scale. They
    may also count past the step at which Keras doubles the scale, and looks for that one only.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer) or not optimizer.built:
        return []
    scale, steps = optimizer.dynamic_scale, optimizer.step_counter
    counted = tf.minimum(steps.value, tf.cast(optimizer.dynamic_growth_steps - 1, steps.dtype))
    return [(scale, tf.identity(scale.value)), (steps, counted)]


def any_rows(value: Any) -> Any:
    """Returns the description of a batch's tensor, for any number of rows."""
    if value is None or isinstance(value, tf.experimental.Optional):
        return value
    spec = tf.type_spec_from_value(value)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            [None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
