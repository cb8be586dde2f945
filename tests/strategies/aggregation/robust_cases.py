"""Cases: training with a robust rule, on data of which one rank's rows may be wrong."""

import os
import signal

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.aggregation import numpy_rules
from tests.harness import rank_job
from tests.strategies.cases import MODELS, InScope, compiled, data, outcome
from tfdml.aggregation import CenteredClipping, RobustRule, TrimmedMean
from tfdml.callbacks.checkpoint.directory_use import leave_directory

BATCH, RATE = 12, 0.1
RULES = {
    "trimmed": TrimmedMean(1),
    "clipped": CenteredClipping(0.3, momentum=0.6, iterations=2),
    "clipped_without_momentum": CenteredClipping(0.3, momentum=0.0),
}


def rows_of(ranks: int, rows: int) -> list[np.ndarray]:
    """Returns each rank's rows of a batch."""
    bounds = [-(-rows * rank // ranks) for rank in range(ranks + 1)]
    return [np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def poisoned(x: np.ndarray, wrong: int, ranks: int, value: float = 50.0) -> np.ndarray:
    """Returns the inputs, of which those that a rank gets of each batch are noise of a size."""
    x = x.copy()
    rng = np.random.default_rng(3)
    for start in range(0, len(x), BATCH):
        own = rows_of(ranks, min(BATCH, len(x) - start))[wrong] + start
        x[own] = value * rng.normal(size=x[own].shape)
    return x


def train(
    rule: str | RobustRule | None,
    ranks: int,
    wrong: int | None = None,
    devices: int = 1,
    accumulate: int | None = None,
    model: str = "dense",
    value: float = 50.0,
    rows: int = 50,
) -> dict:
    """Trains on rows of which one rank's may be wrong; returns weights and the clean rows' loss."""
    made = RULES.get(rule, rule)
    strategy = rank_job.strategy(devices, gradient_aggregation=made)
    optimizer = InScope(keras.optimizers.SGD, RATE, gradient_accumulation_steps=accumulate)
    built = compiled(strategy, model, optimizer=optimizer, metrics=[])
    clean, y = data(rows, shape=MODELS[model][1])
    x = clean if wrong is None else poisoned(clean, wrong, ranks, value)
    monitor = tfdml.callbacks.OutlierMonitor()
    history = built.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[monitor]
    )
    history.history.pop("outlier_steps", None)
    loss = built.evaluate(clean, y, batch_size=BATCH, verbose=0)
    return {**outcome(built, history), "clean": np.array(loss), "outliers": monitor.epochs}


def oracle(
    rule: str, ranks: int, wrong: int | None = None, accumulate: int = 1, rows: int = 50
) -> dict:
    """Trains in one process, which plays all ranks in turn and combines their gradients in NumPy.

    Args:
        rule: Name of the rule.
        ranks: The number of ranks.
        wrong: A rank with wrong rows.
        accumulate: Steps of an update.
        rows: The number of rows.

    Returns:
        The weights.
    """
    made = RULES[rule]
    model = compiled(rank_job.strategy())
    x, y = data(rows)
    x = x if wrong is None else poisoned(x, wrong, ranks)
    momentum, weights = numpy_rules.Momentum(made.momentum), model.trainable_variables
    sizes = [int(np.prod(w.shape)) for w in weights]
    center, gathered = np.zeros(sum(sizes)), []
    for start in [*range(0, rows, BATCH)] * 2:
        batch = np.arange(start, min(start + BATCH, rows))
        parts = [batch[own] for own in rows_of(ranks, len(batch))]
        means = np.stack([_gradient(model, x[own], y[own], sum(sizes)) for own in parts])
        fractions = np.array([len(own) / len(batch) for own in parts])
        gathered.append((means * fractions[:, None], fractions))
        if len(gathered) < accumulate:
            continue
        sent, fractions = (np.mean(values, 0) for values in zip(*gathered, strict=True))
        means, gathered = sent / np.where(fractions > 0, fractions, 1)[:, None], []
        if isinstance(made, TrimmedMean):
            combined = numpy_rules.trimmed_mean(means, fractions, made.num_byzantine)
        else:
            combined = center = numpy_rules.centered_clipping(
                momentum(means, fractions), fractions, center, made.radius, made.iterations
            )
        for weight, step in zip(weights, np.split(combined, np.cumsum(sizes)[:-1]), strict=True):
            weight.assign(weight - RATE * step.reshape(weight.shape))
    return outcome(model)


def _gradient(model: keras.Model, x: np.ndarray, y: np.ndarray, size: int) -> np.ndarray:
    if not len(x):
        return np.zeros(size)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    found = tape.gradient(loss, [w.value for w in model.trainable_variables])
    return np.concatenate([np.asarray(g).ravel() for g in found]).astype("float64")


def resumed(rule: str, directory: str, ends_at: int | None) -> dict | None:
    """Trains for 8 steps with a checkpoint; stops this process's training at a step, if given.

    Returns:
        The weights; None if the training was stopped.
    """
    keras.backend.clear_session()
    strategy = rank_job.strategy(gradient_aggregation=RULES[rule])
    model = compiled(strategy, optimizer=InScope(keras.optimizers.SGD, RATE))

    def end(batch: int, logs: dict) -> None:
        if batch + 1 == ends_at:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [
        tfdml.callbacks.FaultTolerantCheckpoint(directory),
        keras.callbacks.LambdaCallback(on_train_batch_end=end),
    ]
    try:
        model.fit(*data(96), batch_size=BATCH, epochs=1, verbose=0, callbacks=callbacks)
    except SystemExit:
        return None
    finally:
        leave_directory(directory)
    return outcome(model)


def resumed_with_the_same_bits(rule: str, directory: str) -> tuple[dict, dict]:
    """Trains once without a stop, and once with one; returns the weights of both."""
    whole = resumed(rule, f"{directory}/whole", None)
    assert resumed(rule, f"{directory}/stopped", 4) is None
    return whole, resumed(rule, f"{directory}/stopped", None)


def error_of(rule: str) -> str:
    """Returns the message with which a strategy refuses a rule."""
    try:
        rank_job.strategy(gradient_aggregation=RULES.get(rule, rule))
    except ValueError as error:
        return str(error)
    return "nothing was raised"
