"""A model's step as a replica runs it, and its outputs that are results of metrics.

During a step, a metric holds only what the replica itself has added. The result that the step
returns, under any key, must be that of all data, which is known only after the step.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdml.strategies.traced import traced, tracing


class MetricValue(NamedTuple):
    """Value that a metric's `result()` returned on a replica.

    Attributes:
        metric: The metric.
        key: Key of the value if `result()` returned a dictionary, else None.
        value: The replica's own value: a tensor.
    """

    metric: keras.metrics.Metric
    key: str | None
    value: Any

    def now(self) -> Any:
        """Returns the metric's current result."""
        found = self.metric.result()
        return found if self.key is None else found[self.key]


class ReplicaStep:
    """A model's step as a replica runs it.

    Args:
        model: The Keras model.
        step: Its `train_step`, `test_step` or similar.
        around: Wrapper that takes the step and returns the function that replicas run instead.

    Attributes:
        results: Outputs that are results of metrics, by key; known once the step is traced.
        derived: Results from which other outputs were computed in the graph, by the output's key.
    """

    def __init__(self, model: keras.Model, step: Callable, around: Callable | None = None):
        self.__name__ = step.__name__
        self.results: dict[str, MetricValue] = {}
        self.derived: dict[str, list[MetricValue]] = {}
        self._model = model
        self._all: list[MetricValue] = []
        noting = functools.wraps(step)(functools.partial(self._note, step))
        self._step = noting if around is None else around(noting)

    def __call__(self, data: Any) -> Any:
        """Runs the step on each replica; called in cross-replica context."""
        self._all = []
        with _noting(all_metrics(self._model)):
            return self._model.distribute_strategy.run(self._step, args=(data,))

    def _note(self, step: Callable, data: Any) -> Any:
        results: list[MetricValue] = []
        with tracing(results=results):
            outputs = step(data)
        if isinstance(outputs, dict):
            found = {id(result.value): result for result in results}
            own = {k: v for k, v in outputs.items() if id(v) not in found}
            self.results = {k: found[id(v)] for k, v in outputs.items() if k not in own}
            self.derived = {k: used for k, v in own.items() if (used := _used(v, found))}
            self._all += results
        return outputs

    def refuse_derived(self) -> None:
        """Refuses outputs that were computed from metrics' results.

        Raises:
            ValueError: If the step has such an output.
        """
        for key, used in self.derived.items():
            raise ValueError(
                f"`{self.__name__}` must return metrics' results unchanged, because "
                f"a result over the whole data is not known within a step of this kind. Received: "
                f"{key!r}, computed from {used[0].metric.name!r}. Make it a separate "
                f"metric, or compute it in a callback."
            )

    def recompute_output(self, output: Any) -> Any:
        """Returns an output of the step, computed again from the metrics' current results.

        Args:
            output: A replica's output whose key is in `derived`.

        Raises:
            ValueError: If the step was not traced in the caller's graph.
        """
        graph = tf.compat.v1.get_default_graph()
        if any(result.value.graph is not graph for result in self._all):
            self.refuse_derived()
        now = {id(result.value): tf.convert_to_tensor(result.now()) for result in self._all}
        return tf.nest.map_structure(lambda tensor: _recomputed(tensor, now), output)


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns all metrics of a model, including those that an overridden `metrics` leaves out."""
    known = {id(metric): metric for metric in [*model.metrics, *model._metrics]}
    return list(known.values())


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of all of a model's metrics."""
    return [variable for metric in all_metrics(model) for variable in metric.variables]


@contextlib.contextmanager
def _noting(metrics: list[keras.metrics.Metric]) -> Iterator[None]:
    """Context manager: records what each metric's `result` returns."""
    for metric in metrics:
        metric.result = functools.partial(_noted_result, metric, metric.result)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.result


def _noted_result(metric: keras.metrics.Metric, result: Callable) -> Any:
    found, noted = result(), traced().results
    if noted is not None:
        parts = found if isinstance(found, dict) else {None: found}
        noted += [MetricValue(metric, key, value) for key, value in parts.items()]
    return found


def _used(output: Any, results: dict[int, MetricValue]) -> list[MetricValue]:
    """Returns the results that an output was computed from, in the graph being traced."""
    if tf.executing_eagerly():
        return []
    used: list[MetricValue] = []
    for tensor in tf.nest.flatten(output):
        if tf.is_tensor(tensor):
            reached = [t for op in _operations(tensor, results) for t in op.inputs]
            used += [results[id(t)] for t in reached if id(t) in results]
    return used


def _recomputed(tensor: tf.Tensor, now: dict[int, tf.Tensor]) -> tf.Tensor:
    """Returns a tensor of the graph being traced, computed again from other values.

    Args:
        tensor: Tensor that was computed from the old values.
        now: New values, by the `id` of the old value that each replaces.
    """
    replaced = dict(now)
    for op in sorted(_operations(tensor, now), key=lambda op: op._id):
        inputs = [replaced.get(id(t), t) for t in op.inputs]
        if all(new is old for new, old in zip(inputs, op.inputs, strict=True)):
            continue
        attributes = {k: v for k, v in op.node_def.attr.items() if k != "_class"}
        types = [t.dtype for t in op.outputs]
        copy = op.graph.create_op(op.type, inputs, types, attrs=attributes, op_def=op.op_def)
        replaced.update(zip(map(id, op.outputs), copy.outputs, strict=True))
    return replaced.get(id(tensor), tensor)


def _operations(tensor: tf.Tensor, ends: Collection[int]) -> set[tf.Operation]:
    """Returns the operations that a tensor depends on, up to tensors with the given ids."""
    found: set[tf.Operation] = set()
    waiting = [tensor]
    while waiting:
        reached = waiting.pop()
        if id(reached) not in ends and reached.op not in found:
            found.add(reached.op)
            waiting += reached.op.inputs
    return found
