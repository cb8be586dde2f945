"""One process that plays all ranks in turn: what training with local updates must give."""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf


def played(
    model: keras.Model,
    inner: keras.Optimizer,
    make_outer: Callable[[], keras.Optimizer],
    loss: Callable,
    batches: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    sync_every: int,
    epoch_steps: int,
    fragments: int = 1,
    average_slots: bool = False,
) -> list[np.ndarray]:
    """Trains with local updates; returns the weights at the end.

    Args:
        model: A built model.
        inner: Optimizer of the local steps.
        make_outer: Function that returns an optimizer of the common weights, for each fragment.
        loss: Function of labels and predictions that returns the mean loss of a batch.
        batches: For each step, each rank's rows and labels; a rank may have none.
        sync_every: Steps between synchronizations.
        epoch_steps: Steps of an epoch.
        fragments: Number of parts that are synchronized in turn.
        average_slots: Whether the inner optimizer's slots are averaged with the first part.
    """
    weights, ranks = model.trainable_variables, len(batches[0])
    inner.build(weights)
    variables = [*weights, *inner.variables]
    averages = getattr(inner, "_model_variables_moving_average", None) or []
    others = [*averages, inner._learning_rate]
    slots = [v for v in inner.variables if all(v is not other for other in others)]
    states = [[v.numpy() for v in variables] for _ in range(ranks)]
    anchors = [keras.Variable(v.numpy()) for v in weights]
    parts = [list(range(f, len(weights), fragments)) for f in range(fragments)]
    outers = [make_outer() for _ in parts]
    rows, rows_since_any = np.zeros([fragments, ranks]), np.zeros(ranks)

    def average(of: Sequence[keras.Variable], rows_of: np.ndarray) -> None:
        shares = rows_of / rows_of.sum() if rows_of.any() else np.full(ranks, 1 / ranks)
        for i in [i for i, v in enumerate(variables) if any(v is own for own in of)]:
            if states[0][i].dtype.kind == "f":
                mean = sum(share * state[i] for share, state in zip(shares, states, strict=True))
                for state in states:
                    state[i] = mean

    def synchronize(numbers: Sequence[int]) -> None:
        for f in numbers:
            shares = rows[f] / rows[f].sum()
            moves = [
                sum(shares[r] * (anchors[i].numpy() - states[r][i]) for r in range(ranks))
                for i in parts[f]
            ]
            own = [anchors[i] for i in parts[f]]
            outers[f].apply([keras.ops.convert_to_tensor(move) for move in moves], own)
            for state in states:
                for i in parts[f]:
                    state[i] = anchors[i].numpy()
        if average_slots and 0 in numbers:
            average(slots, rows[0])
        average(averages, rows_since_any)
        rows_since_any[:] = 0
        for f in numbers:
            rows[f] = counted[f] = 0

    for number, batch in enumerate(batches):
        if number % epoch_steps == 0:
            counted = [sync_every * f // fragments for f in range(fragments)]
        for rank, (x, y) in enumerate(batch):
            _assign(variables, states[rank])
            with tf.GradientTape() as tape:
                mean = loss(y, model(x, training=True)) if len(x) else None
            values = tape.gradient(mean, weights) if len(x) else map(keras.ops.zeros_like, weights)
            inner.apply(list(values), weights)
            states[rank] = [v.numpy() for v in variables]
            rows[:, rank] += len(x)
            rows_since_any[rank] += len(x)
        counted = [own + 1 for own in counted]
        due = [f for f in range(fragments) if counted[f] >= sync_every]
        if due:
            synchronize(due)
        changed = [f for f in range(fragments) if rows[f].any()]
        if changed and (number + 1) % epoch_steps == 0:
            synchronize(changed)
    _assign(variables, states[0])
    # With `use_ema`, the averages become the weights.
    inner.finalize_variable_values(weights)
    return [v.numpy() for v in weights]


def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
