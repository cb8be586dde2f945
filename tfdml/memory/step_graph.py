"""The graph of a train step, traced without running or allocating anything."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.tensor_memory.graph_nodes import variables_bytes
from tfdml.tensor_memory.unbuilt_copy import unbuilt_copy


@dataclasses.dataclass(frozen=True)
class OptimizerUpdate:
    """One optimizer's update in a traced step.

    Attributes:
        optimizer: The model's own optimizer.
        copy: The optimizer that was traced in its place. Its variables have no values.
        gradients: The gradients: symbolic tensors, `tf.IndexedSlices` or None.
        variables: Their variables.
        nbytes: Bytes of the variables.
    """

    optimizer: keras.Optimizer
    copy: keras.Optimizer
    gradients: list
    variables: list[keras.Variable]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A traced step.

    Attributes:
        graph: The graph.
        updates: The updates, in the order in which the step makes them.
        first_of_update: Number of operations before those of the first update.
        results: Structure of symbolic tensors that the step returned.
        weights: Bytes of all of the model's variables.
    """

    graph: tf.Graph
    updates: list[OptimizerUpdate]
    first_of_update: int
    results: Any
    weights: int


class _Traced(Exception):
    """Ends a trace before its variables get values: those of optimizers stay unallocated."""


# Copies of a model's optimizers, by the id of the model's own.
Copies = dict[int, keras.Optimizer]


def trace_step(
    model: keras.Model,
    data: Any,
    copies: Copies,
    stand_ins: Callable[[], contextlib.AbstractContextManager],
) -> StepGraph:
    """Traces a model's `train_step`, with its optimizers' updates.

    Nothing runs. Slots are created as variables without values: `tf.function` gives the variables
    of its first trace their values after the trace, which is abandoned here. A copy of each
    optimizer is traced, so the model's own ones are as they were.

    Args:
        model: A built and compiled model.
        data: Structure of `tf.TensorSpec` that `train_step` gets.
        copies: Copies of the model's optimizers; several traces may share them.
        stand_ins: Returns a context manager that puts variables without values in the place of some
            of the model's, for the time of the trace.

    Raises:
        ValueError: If the step makes no update.
    """
    found: list[StepGraph] = []

    def step(batch: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        updates: list[OptimizerUpdate] = []
        firsts: list[int] = []
        with (
            stand_ins(),
            _recording(model, copies, updates, lambda: firsts.append(_count(graph))),
        ):
            results = model.train_step(batch)
            weights = variables_bytes(model.variables)
        first = firsts[0] if firsts else _count(graph)
        found.append(StepGraph(graph, updates, first, results, weights))
        raise _Traced

    with contextlib.suppress(_Traced):
        tf.function(step, autograph=False).get_concrete_function(data)
    (traced,) = found
    if not traced.updates:
        raise ValueError(
            f"`model.train_step` must apply gradients by an optimizer that is an attribute of the "
            f"model. Received: {type(model).__name__}, whose step applied none. Compile it with "
            f"an optimizer."
        )
    return traced


def _count(graph: tf.Graph) -> int:
    return len(graph.get_operations())


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the optimizers that are attributes of a model, each once."""
    found = [v for v in vars(model).values() if isinstance(v, keras.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


@contextlib.contextmanager
def _recording(
    model: keras.Model, copies: Copies, updates: list[OptimizerUpdate], on_apply: Callable[[], None]
) -> Iterator[None]:
    """Context manager: copies of the model's optimizers make its updates, and metrics are left out.

    Metrics would create variables, which in a strategy must be created in its scope.
    """
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        optimizer.apply = _recorded(optimizer, copies[id(optimizer)], updates, on_apply)
    model.compute_metrics = lambda *args, **kwargs: {}
    try:
        yield
    finally:
        del model.compute_metrics
        for optimizer in optimizers:
            del optimizer.apply


def _recorded(
    optimizer: keras.Optimizer,
    copy: keras.Optimizer,
    updates: list[OptimizerUpdate],
    on_apply: Callable[[], None],
) -> Callable:
    def apply(grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        variables = getattr(optimizer, "_trainable_variables", None)
        variables = list(variables if trainable_variables is None else trainable_variables)
        on_apply()
        nbytes = variables_bytes(variables)
        updates.append(OptimizerUpdate(optimizer, copy, list(grads), variables, nbytes))
        copy.apply(list(grads), [_on_one_device(v) for v in variables])

    return apply


def _on_one_device(variable: keras.Variable) -> keras.Variable | tf.Variable:
    """Returns a mirrored variable's part on the first device: the trace is outside of replicas."""
    parts = getattr(variable.value, "values", None)
    return parts[0] if isinstance(parts, tuple) else variable


def copies_of(model: keras.Model) -> Copies:
    """Returns unbuilt optimizers with the same arguments as a model's own.

    Raises:
        ValueError: If one cannot be made from its config.
    """
    return {id(optimizer): unbuilt_copy(optimizer) for optimizer in optimizers_of(model)}
