"""`tfdml.estimate_memory`: what training a model takes on each rank, without training it."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.memory.checkpointing import best_blocks
from tfdml.memory.choices import choices_of
from tfdml.memory.options import ExchangeOptions
from tfdml.memory.report import MemoryReport
from tfdml.memory.sized_step import SizedStep, step_in_parts, steps_by_rows
from tfdml.memory.tables import LargeTables

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
        strategy: Strategy whose compression, buckets and `min_embedding_bytes` are counted; by
            default the model's own.
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
    options = ExchangeOptions.of(strategy)
    own = strategy.num_replicas_in_sync
    numbers = sorted({*_RANKS, own} if ranks is None else set(ranks))
    rows = {n: options.most_rows(batch_size, n) for n in numbers}
    tables = LargeTables.of(model, options.min_embedding_bytes)
    step_of = steps_by_rows(model, data, tables, max(rows.values()), min(rows.values()))
    obstacle = tables.obstacle(step_of(max(rows.values())).graph.updates)
    may_divide = bool(tables.layers) and obstacle is None
    choices, count = [], 1
    for number in numbers:
        step = step_of(rows[number])
        blocks = best_blocks(step.nodes)
        count = max(count, blocks.count)
        in_parts = None
        if may_divide and number > 1:
            in_parts = step_in_parts(model, data, tables, rows[number], number)
        choices += choices_of(number, step, in_parts, tables, blocks, options)
    notes = _notes(step_of(max(rows.values())), obstacle)
    return MemoryReport(model.name, batch_size, count, tuple(choices), notes)


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


def _notes(step: SizedStep, obstacle: str | None) -> tuple[str, ...]:
    notes = []
    if obstacle is not None:
        notes.append(f"Embedding tables cannot be divided among the ranks. {obstacle}")
    if step.nodes.unknown:
        notes.append(
            f"Not counted: {len(step.nodes.unknown)} tensors whose size is known only in training, "
            f"the first of {step.nodes.unknown[0]}."
        )
    if any(op.type in ("While", "StatelessWhile") for op in step.graph.graph.get_operations()):
        notes.append(
            "The step has loops: checkpointing is estimated with each loop as a whole, loops "
            "without a known length keep more than is counted, and TensorFlow runs up to 32 turns "
            "at once, each with gradients of the loop's weights: the peak may be twice as high."
        )
    return tuple(notes)
