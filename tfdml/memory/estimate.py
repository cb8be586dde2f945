"""`tfdml.estimate_memory`: what training a model takes on each rank, without training it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.compression import Compressor
from tfdml.memory.batch import batch_specs
from tfdml.memory.checkpointing import Blocks, best_blocks
from tfdml.memory.exchange import exchange_bytes, residual_bytes, step_gradients
from tfdml.memory.graph_nodes import StepNodes, nbytes_of, nodes_of
from tfdml.memory.liveness import find_peak
from tfdml.memory.report import Choice, MemoryReport
from tfdml.memory.slots import slot_bytes, variables_bytes
from tfdml.memory.step_graph import Copies, StepGraph, copies_of, trace_step
from tfdml.strategies.replica_strategy import ReplicaStrategy

_RANKS = (1, 2, 4, 8)


def estimate_memory(
    model: keras.Model,
    batch_size: int,
    strategy: tf.distribute.Strategy | None = None,
    *,
    data: Any = None,
    ranks: Sequence[int] | None = None,
) -> MemoryReport:
    """Estimates the bytes that training takes on each rank, for several numbers of ranks.

    Nothing is trained and nothing but the model is allocated: the train step is traced to a graph,
    and the tensors that are alive at each of its operations are added up. The estimate is of what
    training takes above a process that has imported TensorFlow.

    ```python
    report = tfdml.estimate_memory(model, batch_size=256)
    print(report)
    print(report.fits(16e9))
    ```

    Args:
        model: A built and compiled model: functional, sequential or subclassed, with any optimizer
            and any `train_step`.
        batch_size: Rows of a global batch, which the ranks share.
        strategy: Strategy whose compression and buckets are counted; by default the model's own.
        data: A batch `(x, y)` of arrays, tensors or specs, for models that do not say what they
            read, or whose loss takes targets of another shape than their outputs. Only its shapes
            and dtypes are used.
        ranks: Numbers of ranks in the table; by default 1, 2, 4, 8 and the strategy's.

    Raises:
        ValueError: If an argument is wrong, the model is not built or compiled, or its step cannot
            be traced.
    """
    _check(model, batch_size, ranks)
    strategy = model.distribute_strategy if strategy is None else strategy
    options = _Options.of(strategy)
    own = strategy.num_replicas_in_sync
    numbers = sorted({*_RANKS, own} if ranks is None else set(ranks))
    rows = {n: options.most_rows(batch_size, n) for n in numbers}
    copies = copies_of(model)
    most = _Step(model, max(rows.values()), data, copies)
    least = _Step(model, min(rows.values()), data, copies)
    notes = _notes(most)
    choices, count = [], 1
    for number in numbers:
        step = _between(most, least, rows[number], model, data, copies)
        blocks = best_blocks(step.nodes)
        count = max(count, blocks.count)
        choices += _choices(number, model, step, blocks, options)
    return MemoryReport(model.name, batch_size, count, tuple(choices), tuple(notes))


def _check(model: keras.Model, batch_size: int, ranks: Sequence[int] | None) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a keras.Model. Received: model={model!r}. Pass the model that is "
            f"compiled."
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            f"`batch_size` must be a positive number of rows. Received: batch_size={batch_size!r}. "
            f"Pass the rows of a global batch."
        )
    if ranks is not None and (
        not ranks or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in ranks)
    ):
        raise ValueError(
            f"`ranks` must be positive numbers of ranks. Received: ranks={ranks!r}. Use for "
            f"example [1, 2, 4]."
        )
    if not model.compiled or getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"`model` must be compiled with an optimizer, whose slots are counted. Received: "
            f"{model.name}, which is not. Call `model.compile` first."
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built. Received: {model.name}, which has no weights yet. Call "
            f"`model.build(input_shape)`, or the model on a batch."
        )


@dataclasses.dataclass(frozen=True)
class _Options:
    """What an estimate needs to know of a strategy.

    Attributes:
        compressor: Compressor of exchanged gradients, None for none.
        bucket_bytes: Size of a bucket of gradients.
        weights: Parts of a batch by replica, None for equal parts.
        accumulates: Whether accumulated gradients are kept besides Keras's own.
    """

    compressor: Compressor | None = None
    bucket_bytes: int = BUCKET_BYTES
    weights: tuple[int, ...] | None = None
    accumulates: bool = False

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "_Options":
        """Returns a strategy's options.

        Raises:
            ValueError: If variables are on parameter servers.
        """
        if not isinstance(strategy, tf.distribute.Strategy) or isinstance(
            strategy, tf.distribute.experimental.ParameterServerStrategy
        ):
            raise ValueError(
                f"`strategy` must be a synchronous strategy, whose ranks hold the whole model. "
                f"Received: strategy={strategy!r}. Parameter servers share weights and slots; "
                f"estimate a worker with the default strategy."
            )
        if not isinstance(strategy, ReplicaStrategy):
            return cls()
        options = strategy.extended.options
        return cls(options.compression, options.bucket_bytes, strategy.batch_weights, True)

    def most_rows(self, batch_size: int, ranks: int) -> int:
        """Returns the most rows that a rank gets of a batch."""
        if self.weights is not None and len(self.weights) == ranks:
            return math.ceil(batch_size * max(self.weights) / sum(self.weights))
        return math.ceil(batch_size / ranks)


class _Step:
    """A step on some rows, and what follows from its graph.

    Args:
        model: The model.
        rows: Rows of a rank.
        data: A batch, or None; see `estimate_memory`.
        copies: Copies of the optimizers; see `trace_step`.
    """

    def __init__(self, model: keras.Model, rows: int, data: Any, copies: Copies):
        self.rows = rows
        self.graph = _traced(model, rows, data, copies)
        gradients = [g for update in self.graph.updates for g in update.gradients]
        self.nodes: StepNodes = nodes_of(
            self.graph.graph,
            [self.graph.results],
            gradients,
            self.graph.first_of_update,
            [inner for _, inner in self.graph.graph.captures],
        )

    def at(self, rows: int, other: "_Step") -> "_Step":
        """Returns the step on other rows: sizes lie on a line through those of two steps."""
        found = object.__new__(_Step)
        found.rows, found.graph = rows, self.graph
        part = (rows - other.rows) / (self.rows - other.rows)
        sizes = [
            math.ceil(small + part * (large - small))
            for large, small in zip(self.nodes.sizes, other.nodes.sizes, strict=True)
        ]
        found.nodes = dataclasses.replace(self.nodes, sizes=sizes)
        return found


def _between(
    most: _Step, least: _Step, rows: int, model: keras.Model, data: Any, copies: Copies
) -> _Step:
    if rows == most.rows:
        return most
    if rows == least.rows:
        return least
    if most.nodes.nodes == least.nodes.nodes:
        return most.at(rows, least)
    # Python code of the step depends on the number of rows.
    return _Step(model, rows, data, copies)


def _traced(model: keras.Model, rows: int, data: Any, copies: Copies) -> StepGraph:
    """Traces the step with the first batch that it accepts.

    Raises:
        ValueError: If it accepts none.
    """
    first: Exception | None = None
    for specs in batch_specs(model, rows, data):
        try:
            return trace_step(model, specs, copies)
        except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
            first = first or error
    raise ValueError(
        f"`data` must be a batch that `{type(model).__name__}.train_step` takes. Received: "
        f"{'what the model seems to read' if data is None else 'another one'}, which fails: "
        f"{first} Pass `data=(x, y)`."
    ) from first


def _choices(
    ranks: int, model: keras.Model, step: _Step, blocks: Blocks, options: _Options
) -> list[Choice]:
    """Returns the choices of a number of ranks."""
    nodes, updates = step.nodes, step.graph.updates
    before, after = nodes.nodes[: nodes.num_before_update], nodes.nodes[nodes.num_before_update :]
    weights, slots = variables_bytes(model.variables), slot_bytes(updates)
    gradients = sum(
        nbytes_of(t) or 0
        for update in updates
        for t in tf.nest.flatten(update.gradients, expand_composites=True)
        if t is not None
    )
    accumulated = _accumulated_bytes(step, options)
    activations = find_peak(before, nodes.sizes, weightless=nodes.gradients).nbytes
    backward = find_peak(before, nodes.sizes, held=nodes.gradients).nbytes
    updating = find_peak(after, nodes.sizes, given=nodes.gradients).nbytes
    exchanged = [
        (step_gradients(update), ranks, options.compressor, options.bucket_bytes)
        for update in updates
    ]
    exchange = sum(exchange_bytes(*each) for each in exchanged)
    residuals = sum(residual_bytes(*each) for each in exchanged)
    saved = blocks.kept - blocks.nbytes
    found = []
    for checkpointing in (False, True):
        for sharding in (False, True)[: 1 if ranks == 1 else 2]:
            own_slots = math.ceil(slots / ranks) if sharding else slots
            less = saved if checkpointing else 0
            found.append(
                Choice(
                    ranks,
                    sharding,
                    checkpointing,
                    weights,
                    gradients + accumulated,
                    own_slots,
                    activations - less,
                    exchange,
                    residuals,
                    weights
                    + own_slots
                    + residuals
                    + accumulated
                    + max(backward - less, updating + exchange),
                )
            )
    return found


def _accumulated_bytes(step: _Step, options: _Options) -> int:
    """Returns the bytes of accumulators in which tfdml's strategies sum gradients over steps."""
    if not options.accumulates:
        return 0
    inner = [getattr(u.optimizer, "inner_optimizer", u.optimizer) for u in step.graph.updates]
    return sum(
        variables_bytes(update.variables)
        for update, optimizer in zip(step.graph.updates, inner, strict=True)
        if optimizer.gradient_accumulation_steps
    )


def _notes(step: _Step) -> list[str]:
    notes = []
    if step.nodes.unknown:
        notes.append(
            f"Not counted: {len(step.nodes.unknown)} tensors whose size is known only in training, "
            f"the first of {step.nodes.unknown[0]}."
        )
    if any(op.type in ("While", "StatelessWhile") for op in step.graph.graph.get_operations()):
        notes.append(
            "The step has loops: checkpointing is estimated with each loop as a whole, and loops "
            "without a known length keep more than is counted."
        )
    return notes
