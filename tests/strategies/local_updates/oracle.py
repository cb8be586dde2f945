"""One process that plays all ranks in turn: what training with local updates must give."""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf


def played(
    model: keras.Model,
    inner: keras.Optimizer,
    outer: keras.Optimizer,
    loss: Callable,
    batches: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    sync_every: int,
    epoch_steps: int,
) -> list[np.ndarray]:
    """Trains with local updates; returns the last common weights.

    Args:
        model: A built model.
        inner: Optimizer of the local steps.
        outer: Optimizer of the common weights.
        loss: Function of labels and predictions that returns the mean loss of a batch.
        batches: For each step, each rank's rows and labels; a rank may have none.
        sync_every: Steps between synchronizations.
        epoch_steps: Steps of an epoch.
    """
    weights, ranks = model.trainable_variables, len(batches[0])
    inner.build(weights)
    variables = [*weights, *inner.variables]
    states = [[v.numpy() for v in variables]] * ranks
    anchors = [keras.Variable(v.numpy()) for v in weights]
    rows, since = np.zeros(ranks), 0
    for number, parts in enumerate(batches, 1):
        for rank, (x, y) in enumerate(parts):
            _assign(variables, states[rank])
            with tf.GradientTape() as tape:
                mean = loss(y, model(x, training=True)) if len(x) else None
            values = tape.gradient(mean, weights) if len(x) else map(keras.ops.zeros_like, weights)
            inner.apply(list(values), weights)
            states[rank] = [v.numpy() for v in variables]
            rows[rank] += len(x)
        since += 1
        if since == sync_every or number % epoch_steps == 0:
            moves = [
                sum(rows[r] / rows.sum() * (a.numpy() - states[r][i]) for r in range(ranks))
                for i, a in enumerate(anchors)
            ]
            outer.apply([keras.ops.convert_to_tensor(move) for move in moves], anchors)
            common = [anchor.numpy() for anchor in anchors]
            states = [[*common, *state[len(common) :]] for state in states]
            rows, since = np.zeros(ranks), 0
    return [anchor.numpy() for anchor in anchors]


def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
