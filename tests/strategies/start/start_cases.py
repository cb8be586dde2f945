"""Cases run by ranks: how a call starts."""

import contextlib
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

from tests.harness import rank_job
from tests.strategies.cases import compiled, data, outcome
from tests.strategies.contract.training_cases import Recorder


def forget_seeds() -> None:
    """Makes this a process without a seed."""
    context.context()._seed = None


def samples_without_seed(rows: int = 40) -> list[list[int]]:
    """Returns the samples that this rank trained on in each of two epochs, without a seed."""
    forget_seeds()
    ids = np.arange(rows, dtype="float32")[:, None]
    strategy = rank_job.strategy()
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
    """Only rank 0 loads weights, before `predict`, `evaluate` and `fit`."""
    x, y = data(24)
    path = Path(directory, "other.weights.h5")
    strategy = rank_job.strategy()
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
    """Interrupts training, and resumes from `BackupAndRestore`'s files on rank 0."""
    x, y = data(24)
    own = Path(directory, f"rank{rank_job.rank()}")
    own.mkdir(exist_ok=True)
    strategy = rank_job.strategy()

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
    """The same training as `backed_up` without interruption; the history is of the last epochs."""
    x, y = data(24)
    model = compiled(rank_job.strategy())
    history = model.fit(x, y, batch_size=12, epochs=5, shuffle=False, verbose=0)
    result = outcome(model, history)
    result["history"] = {k: v[3:] for k, v in result["history"].items()}
    return result


def noisy_data(kind: str) -> dict:
    """Data to which each process adds different noise."""
    forget_seeds()
    x, y = data(40)
    layer = keras.layers.GaussianNoise(0.1, seed=rank_job.rank())

    def noisy(a, b):
        if kind == "layer":
            return layer(a, training=True), b
        return a + tf.random.normal([6]), b

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(noisy).batch(8)
    model = compiled(rank_job.strategy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(dataset, epochs=2, verbose=0)
    return {"loss": history.history["loss"], "warned": " ".join(str(w.message) for w in caught)}


def heartbeat_seconds() -> float:
    """Returns the seconds after which TensorFlow takes a silent worker for lost."""
    rank_job.strategy()
    return context.context().coordination_service.heartbeat_timeout_in_ms / 1000


class RandomSlots(keras.optimizers.SGD):
    """Optimizer whose slots begin with random numbers, other ones on each rank."""

    def build(self, variables):
        """Makes the slots."""
        super().build(variables)
        random = np.random.default_rng(rank_job.rank())
        self.random = [self.add_variable_from_reference(v, name="random") for v in variables]
        for slot in self.random:
            slot.assign(random.normal(size=slot.shape))


def built_optimizer(kind: str) -> dict:
    """Returns an optimizer's variables after `build`, and how many broadcasts that took."""
    strategy = rank_job.strategy()
    sent, collective = [], strategy.extended.collective
    broadcast = collective.broadcast

    def counted(tensor, name, root=0):
        sent.append(name)
        return broadcast(tensor, name, root)

    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), *(layers.Dense(8) for _ in range(5))])
        optimizer = RandomSlots() if kind == "random" else keras.optimizers.Adam()
        collective.broadcast = counted
        optimizer.build(model.trainable_variables)
    del collective.broadcast
    return {"broadcasts": len(sent), "values": [v.numpy() for v in optimizer.variables]}
