"""Cases run by ranks: training and reading with pipelines."""

import contextlib

import keras
import numpy as np

import tfdml
from tests.harness import rank_job

SAMPLES, BATCH = 100, 12


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    built = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return built


class Recorder(keras.callbacks.Callback):
    """Records each batch's loss; can stop training in mid-epoch."""

    def __init__(self, stop_after: int | None):
        super().__init__()
        self.losses: list[float] = []
        self._left = stop_after

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        if self._left is not None:
            self._left -= 1
            self.model.stop_training = self.model.stop_training or self._left <= 0
            if self._left == 0:
                raise KeyboardInterrupt


def fit(
    directory: str,
    epochs: int,
    state: dict | None = None,
    weights: list | None = None,
    stop_after: int | None = None,
    in_scope: bool = True,
    **options,
) -> dict:
    """Trains on a pipeline; returns this rank's outcome."""
    strategy = rank_job.strategy()
    with strategy.scope():
        built = model()
        if weights is not None:
            built.set_weights(weights)
    with strategy.scope() if in_scope else contextlib.nullcontext():
        pipeline = tfdml.data.read_tfrecords(
            directory, BATCH, label="y", features=["x"], seed=5, state=state, **options
        )
    recorder = Recorder(stop_after)
    with contextlib.suppress(KeyboardInterrupt):
        built.fit(
            pipeline,
            epochs=epochs,
            initial_epoch=pipeline.state()["epoch"],
            verbose=0,
            callbacks=[pipeline.callback(), recorder],
        )
    return {
        "losses": recorder.losses,
        "weights": [np.asarray(w) for w in built.get_weights()],
        "state": pipeline.state(),
        "blocks": pipeline._fetcher.reader.blocks_read,
        "rank": strategy.rank,
    }


def own_ids(directory: str) -> list[np.ndarray]:
    """Returns the ids that this rank reads in each step of the strategy."""
    from tfdml.strategies.input.sharded_input import local_shares

    strategy = rank_job.strategy()
    with strategy.scope():
        pipeline = tfdml.data.read_tfrecords(directory, BATCH, features=["id"], seed=5)
    if strategy.size == 1:
        return [batch.numpy() for batch in pipeline]
    shares, _ = local_shares(pipeline, strategy.extended.splitter)
    return [local_batch.parts[0].numpy() for local_batch in shares]


def evaluate_and_predict(directory: str) -> tuple[float, np.ndarray]:
    with rank_job.strategy().scope():
        built = model()
        options = {"features": ["x"], "shuffle": False}
        labelled = tfdml.data.read_tfrecords(directory, BATCH, label="y", **options)
        loss, _ = built.evaluate(labelled, verbose=0)
        plain = tfdml.data.read_tfrecords(directory, BATCH, **options)
        return loss, built.predict(plain, verbose=0)
