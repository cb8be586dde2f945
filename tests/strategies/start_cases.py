"""What the ranks run to show how a call starts, and TensorFlow's tutorial for several workers."""

import contextlib
import os
import shutil
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from tensorflow.python.eager import context

from tests.harness import job
from tests.strategies.cases import compiled, data, outcome
from tests.strategies.training_cases import Recorder


def forget_seeds() -> None:
    """Makes this a process where nobody has set a seed."""
    context.context()._seed = None


def samples_without_seed(rows: int = 40) -> list[list[int]]:
    """Returns the samples that this rank trained on in each of two epochs, nobody having seeded."""
    forget_seeds()
    ids = np.arange(rows, dtype="float32")[:, None]
    strategy = job.strategy()
    with strategy.scope():
        recorder = Recorder()
        model = keras.Sequential([layers.Input((1,)), recorder, layers.Dense(1)])
        model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).shuffle(rows).batch(12)
    epochs = []
    for _ in range(2):
        recorder.seen.clear()
        model.fit(dataset, verbose=0)
        epochs.append([i for batch in recorder.seen for i in batch])
    return epochs


def loaded_by_rank_0(directory: str) -> dict:
    """Rank 0 alone loads weights, before `predict`, `evaluate` and `fit`."""
    x, y = data(24)
    path = Path(directory, "other.weights.h5")
    strategy = job.strategy()
    other, model = compiled(strategy), compiled(strategy)
    other.fit(x, y, batch_size=12, epochs=3, verbose=0)
    if strategy.is_chief:
        other.save_weights(path)
        model.load_weights(path)
    predicted = model.predict(x, verbose=0)
    if strategy.is_chief:
        model.load_weights(path)
    evaluated = model.evaluate(x, y, verbose=0)
    history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    return {"predicted": predicted, "evaluated": evaluated, **outcome(model, history)}


def backed_up(directory: str) -> dict:
    """Training that is interrupted, and goes on from `BackupAndRestore`'s files on rank 0."""
    x, y = data(24)
    own = Path(directory, f"rank{job.rank()}")
    own.mkdir(exist_ok=True)
    strategy = job.strategy()

    def train(stop_after: int | None = None):
        model = compiled(strategy)
        callbacks = [keras.callbacks.BackupAndRestore(str(own / "backup"))]
        if stop_after is not None:

            def interrupt(epoch, logs):
                if epoch == stop_after:
                    raise InterruptedError

            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=interrupt))
        return model, model.fit(
            x, y, batch_size=12, epochs=5, shuffle=False, verbose=0, callbacks=callbacks
        )

    with contextlib.suppress(InterruptedError):
        train(stop_after=3)
    model, history = train()
    return outcome(model, history)


def uninterrupted() -> dict:
    """The same training as `backed_up`, in one go; the history is that of the last epochs."""
    x, y = data(24)
    model = compiled(job.strategy())
    history = model.fit(x, y, batch_size=12, epochs=5, shuffle=False, verbose=0)
    result = outcome(model, history)
    result["history"] = {k: v[3:] for k, v in result["history"].items()}
    return result


def tutorial_of_several_workers(directory: str) -> dict:
    """TensorFlow's tutorial "Multi-worker training with Keras", but for the strategy's name.

    Its steps stand in a row here, its images are scikit-learn's digits, its epochs short.
    """
    forget_seeds()

    def digits_dataset(batch_size):
        x, y = load_digits(return_X_y=True)
        x = (x / 16).astype(np.float32).reshape(-1, 8, 8)
        slices = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int64)))
        return slices.shuffle(2000).repeat().batch(batch_size)

    def build_and_compile_cnn_model():
        model = keras.Sequential(
            [
                layers.InputLayer(shape=(8, 8)),
                layers.Reshape(target_shape=(8, 8, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=0.05),
            metrics=["accuracy"],
        )
        return model

    strategy = job.strategy()
    global_batch_size = 32 * strategy.num_replicas_in_sync
    dataset = digits_dataset(global_batch_size)
    with strategy.scope():
        model = build_and_compile_cnn_model()
    first = model.fit(dataset, epochs=3, steps_per_epoch=40, verbose=0)

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    second = model.fit(dataset.with_options(options), steps_per_epoch=10, verbose=0)

    # "Model saving": every worker saves, and those that are not the chief throw theirs away.
    resolver = strategy.cluster_resolver
    is_chief = resolver.task_type is None or (resolver.task_type, resolver.task_id) == ("worker", 0)
    own = Path(directory) if is_chief else Path(directory, f"workertemp_{resolver.task_id}")
    own.mkdir(exist_ok=True)
    model.save(own / "model.keras")
    # "Checkpoint saving and restoring".
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(checkpoint, directory=str(own / "ckpt"), max_to_keep=1)
    path = manager.save()
    before = [v.numpy() for v in model.trainable_weights]
    with strategy.scope():
        loaded = keras.models.load_model(own / "model.keras")
    loaded.fit(digits_dataset(global_batch_size), steps_per_epoch=5, verbose=0)
    model.fit(dataset, steps_per_epoch=2, verbose=0)
    checkpoint.restore(path).assert_existing_objects_matched()
    for variable, value in zip(model.trainable_weights, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    if not is_chief:
        shutil.rmtree(own)

    # "The BackupAndRestore callback".
    callbacks = [keras.callbacks.BackupAndRestore(backup_dir=os.path.join(directory, "backup"))]
    with strategy.scope():
        model = build_and_compile_cnn_model()
    third = model.fit(dataset, epochs=2, steps_per_epoch=20, callbacks=callbacks, verbose=0)
    return {
        "accuracy": [h.history["accuracy"] for h in (first, second, third)],
        "weights": [v.numpy() for v in [*model.weights, *loaded.weights]],
    }


def noisy_data(kind: str) -> dict:
    """Data to which each process adds noise of its own."""
    forget_seeds()
    x, y = data(40)
    layer = keras.layers.GaussianNoise(0.1, seed=job.rank())

    def noisy(a, b):
        if kind == "layer":
            return layer(a, training=True), b
        return a + tf.random.normal([6]), b

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(noisy).batch(8)
    model = compiled(job.strategy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(dataset, epochs=2, verbose=0)
    return {"loss": history.history["loss"], "warned": " ".join(str(w.message) for w in caught)}
