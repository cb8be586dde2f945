"""Cases run by ranks: steps of which some overflow on one replica."""

import keras
import numpy as np
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data
from tfdml.mixed_precision import LossScaleOptimizer

ROWS = 12


def overflowing(
    row: int, compressor: str | None, ema: bool, devices: int = 1, limit: int | None = None
) -> dict:
    """Trains two steps, one that overflows on the replica of a row, and one more.

    Args:
        row: Row of the batch whose gradients overflow.
        compressor: Compressor of the gradients.
        ema: Whether the optimizer keeps moving averages.
        devices: Replicas of each process.
        limit: If given, all further steps overflow, until an error is raised.
    """
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(ROWS)
    strategy = rank_job.strategy(devices, compression=compressor)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(64, activation="relu") for _ in range(2)]
        model = keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(5, dtype="float32")])
        inner = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=ema)
        scaled = LossScaleOptimizer(
            inner, initial_scale=2.0**10, minimum_scale=2.0**8, max_skipped_steps=limit
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(scaled, loss)
    good, bad = np.ones(ROWS, "float32"), np.ones(ROWS, "float32")
    bad[row] = np.inf

    def state() -> list[bytes]:
        aggregator_state = list(strategy.extended.get_aggregator(scaled).state.values())
        return [
            v.numpy().tobytes() for v in [*model.variables, *inner.variables, *aggregator_state]
        ]

    for _ in range(2):
        model.train_on_batch(x, y, good)
    before = state()
    model.train_on_batch(x, y, bad)
    after, scale = state(), float(scaled.dynamic_scale.numpy())
    error = None
    if limit is not None:
        try:
            for _ in range(limit + 1):
                model.train_on_batch(x, y, bad)
        except Exception as raised:  # noqa: BLE001 (the error is the case's result)
            error = str(raised)
    else:
        model.train_on_batch(x, y, good)
    return {
        "unchanged": [a == b for a, b in zip(before, after, strict=True)],
        "scale": scale,
        "last_scale": float(scaled.dynamic_scale.numpy()),
        "iterations": int(inner.iterations.numpy()),
        "wrapped_once": model.optimizer is scaled,
        "weights": [v.numpy() for v in model.trainable_variables],
        "error": error,
    }


def converged(policy: str, compressor: str | None) -> dict:
    """Trains to convergence; a scale that grows often overflows occasionally."""
    keras.config.set_dtype_policy(policy)
    x = np.random.default_rng(0).normal(size=(256, 16)).astype("float32")
    y = (x @ np.random.default_rng(1).normal(size=(16, 5))).argmax(1)
    strategy = rank_job.strategy(compression=compressor)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        hidden = layers.Dense(64, activation="relu")
        model = keras.Sequential([layers.Input((16,)), hidden, layers.Dense(5, dtype="float32")])
        optimizer = inner = keras.optimizers.SGD(0.1, momentum=0.9)
        if policy == "mixed_float16":
            optimizer = LossScaleOptimizer(inner, dynamic_growth_steps=12)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    epochs, batch = 25, 32
    history = model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0).history
    return {
        "first": history["loss"][0],
        "loss": history["loss"][-1],
        "accuracy": history["accuracy"][-1],
        "skipped": epochs * len(x) // batch - int(inner.iterations.numpy()),
    }
