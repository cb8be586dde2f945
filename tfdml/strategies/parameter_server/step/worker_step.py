"""The function that a worker runs: a model's step on a batch, with the results in one vector."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.input.local_batch import rows_or_zero, unpacked, without_optionals
from tfdml.strategies.parameter_server.result_table import ROW_SPEC, ResultTable
from tfdml.strategies.parameter_server.step.result_packing import pack
from tfdml.strategies.parameter_server.step.step_scope import StepScope
from tfdml.strategies.replicas.replica_step import MetricValue, ReplicaStep, metric_variables

_STREAM = tf.TensorSpec([], tf.int64)


class WorkerStep:
    """A model's train, test or predict step as functions for workers.

    Args:
        model: The model.
        step: The model's `train_step`, `test_step` or `predict_step`.

    Attributes:
        own_names: Keys of the step's outputs that are not metrics' results; known after tracing.
    """

    def __init__(self, model: keras.Model, step: Callable):
        self._model = model
        self._step = ReplicaStep(model, step)
        self._functions: dict[Any, Callable] = {}
        self.own_names: list[str] = []

    @property
    def metric_results(self) -> dict[str, MetricValue]:
        """The step's outputs that are metrics' results, by key; known after tracing."""
        return self._step.results

    def on_iterator(self, iterators: Any, table: ResultTable) -> Callable:
        """Returns a function that takes `steps_per_execution` steps on a worker's own data.

        Args:
            iterators: Iterators, one on each worker.
            table: Table for the sum of the steps' contributions to the metrics, the last step's own
                results, and the sum of their rows.

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
                # Metrics and rows are summed; of the steps' own results, the last step's are kept.
                metrics = vector.shape[0] - own - 1
                added = tf.constant([1.0] * metrics + [0.0] * own + [1.0], vector.dtype)
                _, vector = tf.while_loop(lambda step, _: step < steps, another, [1, vector])
            table.write(row, vector)

        spec = iterators._values[0]._type_spec
        return self._concrete(run, spec, _STREAM, ROW_SPEC)

    def on_batch(self, batch: Any) -> Callable:
        """Returns a function that takes one step on a batch passed as an argument.

        Args:
            batch: A batch, for its structure, shapes and dtypes.

        Returns:
            A concrete function of such a batch, with any number of rows, and a stream. It returns
            the outputs of `predict_step`, or else the results as one vector.
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
        """Runs the model's step in the graph; returns its outputs."""
        with StepScope([], stream):
            return self._step(step_input(batch))

    def results(self, batch: Any, stream: tf.Tensor) -> tf.Tensor:
        """Takes a step in the graph.

        Returns:
            Its metric contributions, its own results and the number of its rows, packed.
        """
        metrics = metric_variables(self._model)
        own = [(v, tf.zeros(v.shape, v.dtype)) for v in metrics]
        with StepScope(own, stream, loss_scale_snapshot(self._model)) as scope:
            extra = non_metric_outputs(self._step, self._step(step_input(batch)))
        self.own_names = list(extra)
        rows = rows_or_zero(step_input(batch))
        return pack([scope.get_current_value(v) for v in metrics] + [*extra.values(), rows])


def step_input(batch: Any) -> Any:
    """Returns a step's input from a batch that was passed as a function's argument."""
    return without_optionals(unpacked(batch) if isinstance(batch, tuple) else batch)


def non_metric_outputs(step: ReplicaStep, outputs: Any) -> dict[str, tf.Tensor]:
    """Returns the numbers among a step's outputs that are not metrics' results.

    Raises:
        ValueError: If an output was computed from a metric's result.
    """
    if not isinstance(outputs, dict):
        return {"loss": tf.reduce_mean(outputs)} if tf.is_tensor(outputs) else {}
    step.refuse_derived()
    return {
        name: tf.convert_to_tensor(value)
        for name, value in outputs.items()
        if name not in step.results and not isinstance(value, dict)
    }


def loss_scale_snapshot(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns the loss scale and the steps since it changed, with their values at a step's start.

    Other workers may change both during the step, but the loss and its gradients need the same
    scale. They may also count past the step at which Keras doubles the scale, and Keras tests only
    for equality, so the count is capped below it.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer) or not optimizer.built:
        return []
    scale, steps = optimizer.dynamic_scale, optimizer.step_counter
    counted = tf.minimum(steps.value, tf.cast(optimizer.dynamic_growth_steps - 1, steps.dtype))
    return [(scale, tf.identity(scale.value)), (steps, counted)]


def any_rows(value: Any) -> Any:
    """Returns the type spec of a batch's tensor, for any number of rows."""
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
