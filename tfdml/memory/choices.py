"""The choices of a number of ranks: what each takes, from a step of their rows."""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfdml.compression.auto.auto_aggregator import goes_to_owners
from tfdml.memory.checkpointing import Blocks
from tfdml.memory.exchange import (
    exchange_bytes,
    residual_bytes,
    rows_exchange_bytes,
    step_gradients,
)
from tfdml.memory.options import ExchangeOptions
from tfdml.memory.report import Choice
from tfdml.memory.sized_step import SizedStep
from tfdml.memory.slots import common_weight_bytes, slot_bytes, table_slot_bytes
from tfdml.memory.tables import LargeTables
from tfdml.tensor_memory.graph_nodes import nbytes_of
from tfdml.tensor_memory.liveness import find_peak


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Bytes that a step takes on a rank, whether or not slots are sharded.

    Attributes:
        weights: See `Choice`.
        slots: Slots that `sharding` divides.
        table_slots: Slots of a rank's rows of divided tables.
        accumulated: Gradients that are summed over steps.
        gradients: Gradients of the step.
        activations: See `Choice`.
        backward: Peak of the forward and the backward pass.
        updating: Peak of the update.
        exchange: See `Choice`.
        exchanged: Arguments of `residual_bytes` for each update.
    """

    weights: int
    slots: int
    table_slots: int
    accumulated: int
    gradients: int
    activations: int
    backward: int
    updating: int
    exchange: int
    exchanged: list[tuple[Any, ...]]


def choices_of(
    ranks: int,
    step: SizedStep,
    in_parts: SizedStep | None,
    tables: LargeTables,
    blocks: Blocks,
    options: ExchangeOptions,
) -> list[Choice]:
    """Returns the choices of a number of ranks, those that cost least time first.

    Args:
        ranks: The number of ranks.
        step: A step on a rank's rows of the batch.
        in_parts: The same step with a rank's rows of the tables; None if they are not divided.
        tables: The large tables.
        blocks: The blocks that checkpointing divides the step into.
        options: Options of the strategy.
    """
    slots = slot_bytes(step.graph.updates)
    if options.local_updates is not None:
        slots += common_weight_bytes(ranks, step.graph.updates, options.local_updates)
        in_parts = None
    steps = [(False, _taken(ranks, step, LargeTables(), (slots, 0), options))]
    if in_parts is not None:
        whole, part = table_slot_bytes(step.graph.updates, in_parts.graph.updates)
        steps.append((True, _taken(ranks, in_parts, tables, (slots - whole, part), options)))
    may_shard = ranks > 1 and goes_to_owners(options.compressor) and options.local_updates is None
    return [
        _choice(ranks, sharding, checkpointing, divided, taken, blocks)
        for checkpointing in (False, True)
        for divided, taken in steps
        for sharding in (False, True)[: 2 if may_shard else 1]
    ]


def _taken(
    ranks: int,
    step: SizedStep,
    divided: LargeTables,
    slots: tuple[int, int],
    options: ExchangeOptions,
) -> _Taken:
    """Returns what a step takes.

    Args:
        ranks: The number of ranks.
        step: The step.
        divided: Tables of which it has a rank's rows.
        slots: Bytes of the slots that `sharding` divides, and of those of the tables.
        options: Options of the strategy.
    """
    nodes, updates = step.nodes, step.graph.updates
    before, after = nodes.nodes[: nodes.num_before_update], nodes.nodes[nodes.num_before_update :]
    gradients = [
        (gradient, variable)
        for update in updates
        for gradient, variable in zip(update.gradients, update.variables, strict=True)
        if gradient is not None
    ]
    exchanged = [
        (step_gradients(update, divided.has), ranks, options.compressor, options.bucket_bytes)
        for update in updates
    ]
    of_rows = [rows_exchange_bytes(g, options.row_codec) for g, v in gradients if divided.has(v)]
    return _Taken(
        step.graph.weights,
        *slots,
        _accumulated_bytes(step, options),
        sum(_gradient_bytes(gradient) for gradient, _ in gradients),
        find_peak(before, nodes.sizes, weightless=nodes.gradients).nbytes,
        find_peak(before, nodes.sizes, held=nodes.gradients).nbytes,
        find_peak(after, nodes.sizes, given=nodes.gradients).nbytes,
        sum(exchange_bytes(*each) for each in exchanged) + sum(of_rows),
        exchanged,
    )


def _choice(
    ranks: int, sharding: bool, checkpointing: bool, divided: bool, taken: _Taken, blocks: Blocks
) -> Choice:
    slots = math.ceil(taken.slots / (ranks if sharding else 1)) + taken.table_slots
    residuals = sum(residual_bytes(*each, sharding) for each in taken.exchanged)
    less = blocks.kept - blocks.nbytes if checkpointing else 0
    moment = max(taken.backward - less, taken.updating + taken.exchange)
    return Choice(
        ranks,
        sharding,
        checkpointing,
        taken.weights,
        taken.gradients + taken.accumulated,
        slots,
        taken.activations - less,
        taken.exchange,
        residuals,
        taken.weights + slots + residuals + taken.accumulated + moment,
        divided,
    )


def _gradient_bytes(gradient: tf.Tensor | tf.IndexedSlices) -> int:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    parts = (gradient.values, gradient.indices) if is_sparse else (gradient,)
    return sum(nbytes_of(part) or 0 for part in parts)


def _accumulated_bytes(step: SizedStep, options: ExchangeOptions) -> int:
    """Returns the bytes of accumulators in which tfdml's strategies sum gradients over steps."""
    if not options.accumulates:
        return 0
    inner = [getattr(u.optimizer, "inner_optimizer", u.optimizer) for u in step.graph.updates]
    return sum(
        update.nbytes
        for update, optimizer in zip(step.graph.updates, inner, strict=True)
        if optimizer.gradient_accumulation_steps
    )
