"""The function that a worker runs in a synchronous step: gradients of its share, no update."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.parameter_server.step.gradient_encoding import (
    decoded,
    encoded,
    is_encoded,
    new_seed,
)
from tfdml.strategies.parameter_server.step.result_packing import GradientPacking, pack, unpack
from tfdml.strategies.parameter_server.step.step_scope import StepScope
from tfdml.strategies.parameter_server.step.worker_step import (
    any_rows,
    non_metric_outputs,
    step_input,
)
from tfdml.strategies.replicas.replica_step import MetricValue, ReplicaStep, metric_variables
from tfdml.strategies.replicas.step_state import moving_variables


class ShareStep:
    """A model's train step on a share of a global batch, as functions for workers.

    Args:
        model: The model.
        step: Its `train_step`.

    Attributes:
        own_names: Keys of the step's outputs that are not metrics' results; known after tracing.
        has_gradient: Whether each trainable variable has a gradient; known after tracing.
    """

    def __init__(self, model: keras.Model, step: Callable):
        self._model = model
        self._step = ReplicaStep(model, step)
        self._functions: dict[Any, Callable | None] = {}
        self.own_names: list[str] = []
        self.has_gradient: list[bool] = []
        self._metrics = metric_variables(model)
        # Averaged, weighted by rows, as in the other strategies.
        self._moving = moving_variables(model)
        averaged = {id(v) for v in [*self._metrics, *self._moving]}
        # Seeds and counters: every share changes them in the same way, so the first share's are
        # used.
        self._counters = [v for v in model.non_trainable_variables if id(v) not in averaged]
        # Shape and dtype of each encoded gradient, None for the others.
        self._encoded: list[tuple[tf.TensorShape, tf.DType] | None] = []

    @property
    def metric_results(self) -> dict[str, MetricValue]:
        """The step's outputs that are metrics' results, by key; known after tracing."""
        return self._step.results

    def counts(self, *share: Any) -> Callable | None:
        """Returns a function that computes losses' denominators; None if these are just the rows.

        A mean over a mask or over weights divides by a number that depends on the data. The global
        batch's number must be known before gradients can be computed.

        Args:
            *share: The share's batch, its number of rows, the global number of rows, and a random
                stream.
        """

        def run(batch, rows, global_rows, stream):
            scope = self._scope(ShareInfo(rows, global_rows), stream, None)
            with scope:
                self._step(step_input(batch))
            return pack(scope.counts)

        function = self._function("counts", run, share)
        return function if function.outputs[0].shape[0] else None

    def on_share(self, *share: Any) -> Callable:
        """Returns a function that computes a share's results and gradients.

        Args:
            *share: As in `counts`, then the sums of all shares' counts: float64, shape `[counts]`.

        Returns:
            A concrete function that returns a vector of results, and the gradients that exist,
            packed; see `decode`.
        """

        def run(batch, rows, global_rows, stream, totals):
            parts = ShareInfo(rows, global_rows)
            with self._scope(parts, stream, tf.unstack(totals)) as scope:
                extra = non_metric_outputs(self._step, self._step(step_input(batch)))
            self._check_gradients(scope.applied)
            self.own_names = list(extra)
            self.has_gradient = [g is not None for g in scope.gradients]
            averaged = [scope.get_current_value(v) for v in self._moving]
            vector = pack(
                [
                    *(_present(parts, scope.get_current_value(v)) for v in self._metrics),
                    *(_weighed(parts, value) for value in averaged),
                    *(_weighed(parts, value) for value in extra.values()),
                ]
            )
            counters = pack([scope.get_current_value(v) for v in self._counters])
            encoded_ones = self._encode(scope.gradients, stream)
            self._packing = GradientPacking(encoded_ones)
            return tf.concat([vector, counters], 0), self._packing.pack(encoded_ones)

        return self._function("share", run, share)

    def _check_gradients(self, applied: list[tuple[keras.Optimizer, list]]) -> None:
        """Refuses a step whose update the chief cannot make."""
        expected = [(self._model.optimizer, len(self._model.trainable_variables))]
        found = [(optimizer, len(gradients)) for optimizer, gradients in applied]
        if found != expected:
            received = [f"{type(o).__name__} with {count} gradients" for o, count in found]
            raise ValueError(
                f"`train_step` must apply the model's own optimizer once, to gradients of all "
                f"trainable variables, because the chief does it for all workers. Received: "
                f"{', '.join(received) or 'no update'}, for {expected[0][1]} variables. Train "
                f"asynchronously, or use another strategy."
            )

    def _encode(self, gradients: list, stream: tf.Tensor) -> list:
        """Returns the gradients that exist, encoded if the compressor takes them."""
        compressor = self._model.distribute_strategy.compressor
        present = [g for g in gradients if g is not None]
        self._encoded = [
            (g.shape, g.dtype) if compressor is not None and is_encoded(compressor, g) else None
            for g in present
        ]
        seed = new_seed(stream)
        return [
            g if how is None else encoded(compressor, g, seed + i)
            for i, (g, how) in enumerate(zip(present, self._encoded, strict=True))
        ]

    def decode(self, packed: dict[str, Any]) -> list:
        """Decodes a share's packed gradients; called in the graph of the update."""
        gradients = self._packing.unpack(packed)
        compressor = self._model.distribute_strategy.compressor
        return [
            g if how is None else decoded(compressor, g, *how)
            for g, how in zip(gradients, self._encoded, strict=True)
        ]

    def _scope(self, share: ShareInfo, stream: tf.Tensor, totals: Any) -> StepScope:
        own = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics]
        own += [(v, tf.identity(v.value)) for v in [*self._moving, *self._counters]]
        return StepScope(own, stream, share=share, totals=totals)

    def _function(self, kind: str, run: Callable, share: tuple) -> Callable:
        batch, *others = share
        specs = tf.nest.map_structure(any_rows, batch)
        key = (kind, str(specs))
        if key not in self._functions:
            rest = [tf.TensorSpec(t.shape, t.dtype) for t in others]
            with self._model.distribute_strategy.scope():
                made = tf.function(run, autograph=False).get_concrete_function(specs, *rest)
            self._functions[key] = made
        return self._functions[key]

    def assign_state(self, total: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        """Assigns the layers' state after a step; called in the graph of the update.

        Args:
            total: Sum of all shares' vectors.
            first: The first share's vector.

        Returns:
            The metrics' part of the sum, followed by the step's own results.
        """
        metrics, moving, counters = map(_size, (self._metrics, self._moving, self._counters))
        end = total.shape[0] - counters
        averages = total[metrics : metrics + moving]
        for variables, vector in ((self._moving, averages), (self._counters, first[end:])):
            for variable, value in zip(variables, unpack(vector, variables), strict=True):
                variable.value.assign(value)
        return tf.concat([total[:metrics], total[metrics + moving : end]], 0)


def _size(variables: list[keras.Variable]) -> int:
    return sum(int(np.prod(v.shape)) for v in variables)


def _present(share: ShareInfo, value: tf.Tensor) -> tf.Tensor:
    # `tf.where`, not a product with 0: a padded share's value may be NaN.
    return tf.where(share.rows > 0, value, tf.zeros_like(value))


def _weighed(share: ShareInfo, value: tf.Tensor) -> tf.Tensor:
    value = tf.cast(value, tf.float64)
    return _present(share, value * share.fraction(tf.float64))
