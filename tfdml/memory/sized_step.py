"""A train step as nodes, for any number of rows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.memory.batch import batch_specs
from tfdml.memory.step_graph import Copies, StepGraph, copies_of, trace_step
from tfdml.memory.tables import LargeTables
from tfdml.tensor_memory.graph_nodes import StepNodes, nodes_of


@dataclasses.dataclass(frozen=True)
class SizedStep:
    """A step on some rows.

    Attributes:
        rows: Rows of a rank.
        graph: The traced step.
        nodes: Its operations, and the bytes of their results.
    """

    rows: int
    graph: StepGraph
    nodes: StepNodes


def steps_by_rows(
    model: keras.Model, data: Any, tables: LargeTables, most: int, least: int
) -> Callable:
    """Returns a function that returns the `SizedStep` of a number of rows.

    The step is traced for the most and the least rows. Bytes of tensors of other numbers of rows
    lie on a line between both; if they are squares of it, this is too much rather than too little.

    Args:
        model: A built and compiled model.
        data: A batch, or None; see `estimate_memory`.
        tables: Large tables of the model, which are whole in these steps.
        most: Most rows that the function will be called with.
        least: Least rows.

    Raises:
        ValueError: If the step cannot be traced.
    """
    copies = copies_of(model)

    def traced(rows: int) -> SizedStep:
        return _traced(model, rows, data, copies, functools.partial(tables.in_parts, 1))

    large = traced(most)
    small = large if least == most else traced(least)

    def step(rows: int) -> SizedStep:
        if rows in (most, least):
            return large if rows == most else small
        if large.nodes.nodes != small.nodes.nodes or _shapes(large) != _shapes(small):
            # Python code of the step depends on the number of rows, or a gradient's shape does.
            return traced(rows)
        # In integers: a float would round some tensors to a byte more.
        sizes = [
            a - (least - rows) * (b - a) // (most - least)
            for a, b in zip(small.nodes.sizes, large.nodes.sizes, strict=True)
        ]
        return SizedStep(rows, large.graph, dataclasses.replace(large.nodes, sizes=sizes))

    return step


def step_in_parts(
    model: keras.Model, data: Any, tables: LargeTables, rows: int, ranks: int
) -> SizedStep:
    """Returns a step in which this rank has its rows of the tables alone.

    Args:
        model: A built and compiled model.
        data: A batch, or None; see `estimate_memory`.
        tables: Large tables of the model.
        rows: Rows of the rank's batch.
        ranks: The number of ranks, among which the tables are divided.

    Raises:
        ValueError: If the step cannot be traced.
    """
    in_parts = functools.partial(tables.in_parts, ranks)
    return _traced(model, rows, data, copies_of(model), in_parts)


def _shapes(step: SizedStep) -> list[tf.TensorShape]:
    """Returns the shapes of a step's gradients."""
    gradients = [update.gradients for update in step.graph.updates]
    flat = tf.nest.flatten(gradients, expand_composites=True)
    return [gradient.shape for gradient in flat if gradient is not None]


def _traced(
    model: keras.Model, rows: int, data: Any, copies: Copies, stand_ins: Callable
) -> SizedStep:
    """Traces the step with the first batch that it accepts.

    Raises:
        ValueError: If it accepts none.
    """
    first: Exception | None = None
    for specs in batch_specs(model, rows, data):
        try:
            graph = trace_step(model, specs, copies, stand_ins)
        except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
            first = first or error
        else:
            return SizedStep(rows, graph, _nodes(graph))
    raise ValueError(
        f"`data` must be a batch that `{type(model).__name__}.train_step` takes. Received: "
        f"{'what the model seems to read' if data is None else 'another one'}, which fails: "
        f"{first} Pass `data=(x, y)`."
    ) from first


def _nodes(graph: StepGraph) -> StepNodes:
    gradients = [g for update in graph.updates for g in update.gradients]
    captured = [inner for _, inner in graph.graph.captures]
    return nodes_of(graph.graph, [graph.results], gradients, graph.first_of_update, captured)
