"""The choices of a number of ranks: what each takes, from a step of their rows."""

import math

import keras
import tensorflow as tf

from tfdml.compression.auto.auto_aggregator import goes_to_owners
from tfdml.memory.checkpointing import Blocks
from tfdml.memory.exchange import exchange_bytes, residual_bytes, step_gradients
from tfdml.memory.graph_nodes import nbytes_of
from tfdml.memory.liveness import find_peak
from tfdml.memory.options import ExchangeOptions
from tfdml.memory.report import Choice
from tfdml.memory.sized_step import SizedStep
from tfdml.memory.slots import slot_bytes, variables_bytes


def choices_of(
    ranks: int, model: keras.Model, step: SizedStep, blocks: Blocks, options: ExchangeOptions
) -> list[Choice]:
    """Returns the choices of a number of ranks, those that cost no time first.

    Args:
        ranks: The number of ranks.
        model: The model.
        step: Its step on a rank's rows.
        blocks: The blocks that checkpointing divides the step into.
        options: Options of the strategy.
    """
    nodes, updates = step.nodes, step.graph.updates
    before, after = nodes.nodes[: nodes.num_before_update], nodes.nodes[nodes.num_before_update :]
    weights, slots = variables_bytes(model.variables), slot_bytes(updates)
    gradients = sum(_gradient_bytes(g) for u in updates for g in u.gradients if g is not None)
    accumulated = _accumulated_bytes(step, options)
    activations = find_peak(before, nodes.sizes, weightless=nodes.gradients).nbytes
    backward = find_peak(before, nodes.sizes, held=nodes.gradients).nbytes
    updating = find_peak(after, nodes.sizes, given=nodes.gradients).nbytes
    exchanged = [
        (step_gradients(update), ranks, options.compressor, options.bucket_bytes)
        for update in updates
    ]
    exchange = sum(exchange_bytes(*each) for each in exchanged)
    saved = blocks.kept - blocks.nbytes
    may_shard = ranks > 1 and goes_to_owners(options.compressor)
    found = []
    for checkpointing in (False, True):
        for sharding in (False, True)[: 2 if may_shard else 1]:
            residuals = sum(residual_bytes(*each, sharding) for each in exchanged)
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
        variables_bytes(update.variables)
        for update, optimizer in zip(step.graph.updates, inner, strict=True)
        if optimizer.gradient_accumulation_steps
    )
