"""Cases run by ranks: training with compressed gradients."""

import hashlib

import keras
import numpy as np
from keras import layers

from tests.compression.test_compressed_aggregator import Identity
from tests.harness import rank_job
from tests.strategies.cases import data, outcome, seed_ranks_apart
from tfdml import compression
from tfdml.collectives.buckets import BUCKET_BYTES


def train(
    compressor: compression.Compressor | str | None,
    policy: str = "float32",
    devices: int = 1,
    accumulate: int | None = None,
    overflow_at: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict:
    """Trains a model with one large layer and small ones; 33 rows in batches of 8."""
    keras.config.set_dtype_policy(policy)
    x, y = data(33)
    made = Identity() if compressor == "identity" else compression.get(compressor)
    strategy = rank_job.strategy(devices, compression=made, bucket_bytes=bucket_bytes)
    with strategy.scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(64, activation="relu"),
                layers.Dense(64, activation="relu"),
                layers.Dense(5, dtype="float32"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=accumulate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    if overflow_at is not None:
        return _with_overflow(strategy, model, x, y, overflow_at)
    history = model.fit(x, y, batch_size=8, epochs=6, verbose=0)
    return outcome(model, history)


def train_on_sequences(compressor: compression.Compressor) -> dict:
    """Trains dense layers on sequences; also returns the names of what the compressor keeps.

    TensorFlow does not know the shapes of these layers' gradients when it traces the step, because
    the last batch is smaller.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(35, 5, 32)).astype("float32")
    strategy = rank_job.strategy(compression=compressor)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                layers.Input((5, 32)),
                layers.Dense(64, activation="relu", name="below"),
                layers.Dense(32, name="above"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    history = model.fit(x, x[:, ::-1], batch_size=8, epochs=4, verbose=0)
    kept = sorted(strategy.extended.get_aggregator(model.optimizer).state)
    return {**outcome(model, history), "kept": kept}


def weights_after_each_step(compressor: compression.Compressor) -> list[str]:
    """Trains a small model; returns a digest of all weights after each of three steps."""
    x, y = data(33)
    with rank_job.strategy(compression=compressor).scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(400, activation="relu"), layers.Dense(5)]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    digests = []
    for start in (0, 11, 22):
        model.train_on_batch(x[start : start + 11], y[start : start + 11])
        digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights()))
        digests.append(digest.hexdigest())
    return digests


def moved_by_a_step(
    compressor: compression.Compressor, nesterov: bool = False, devices: int = 1
) -> dict[str, list[np.ndarray]]:
    """Trains for three steps; returns which numbers of the weights and slots the last one moved."""
    x, y = data(33)
    with rank_job.strategy(devices, compression=compressor).scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(400, activation="tanh"), layers.Dense(5)]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9, nesterov=nesterov),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    for start in (0, 11, 22):
        before = _weights_and_slots(model)
        model.train_on_batch(x[start : start + 11], y[start : start + 11])
    after = _weights_and_slots(model)
    return {key: [a != b for a, b in zip(after[key], before[key], strict=True)] for key in after}


def _weights_and_slots(model: keras.Model) -> dict[str, list[np.ndarray]]:
    slots = getattr(model.optimizer, "momentums", [])
    return {"weights": model.get_weights(), "slots": [np.array(each) for each in slots]}


def embed(compressor: compression.Compressor | None, devices: int = 1) -> dict:
    """Trains a model whose embedding has sparse gradients."""
    x, y = data(33)
    strategy = rank_job.strategy(devices, compression=compressor)
    with strategy.scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Embedding(40, 16),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(5),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rows = np.abs(x * 1000).astype("int32") % 40
    return outcome(model, model.fit(rows, y, batch_size=8, epochs=2, verbose=0))


def _with_overflow(strategy, model, x, y, at: int) -> dict:
    """Returns the state before and after a step in which the last row overflows."""
    aggregator = strategy.extended.get_aggregator(model.optimizer)
    for step in range(at + 1):
        weights = np.ones(8, "float32")
        state_before = {n: v.numpy() for n, v in aggregator.state.items()}
        weights_before = [v.numpy() for v in model.trainable_weights]
        if step == at:
            weights[-1] = 1e6
        model.train_on_batch(x[:8], y[:8], weights)
    state_after = {n: v.numpy() for n, v in aggregator.state.items()}
    return {
        "unchanged": [state_before[n].tobytes() == state_after[n].tobytes() for n in state_before],
        "weights_kept": [
            b.tobytes() == v.numpy().tobytes()
            for b, v in zip(weights_before, model.trainable_weights, strict=True)
        ],
        "iterations": int(model.optimizer.iterations.numpy()),
    }
