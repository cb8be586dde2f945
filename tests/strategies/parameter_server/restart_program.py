"""Training with checkpoints whose cluster is killed and restarted."""

import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.strategies.parameter_server.cases import CountedMean, classifier, dataset
from tests.strategies.parameter_server.fault_cases import Marks
from tfdml.strategies import ParameterServerStrategy

EPOCHS, STEPS, BATCH, KILLED_AT = 2, 30, 8, 12
# Step after which the learning rate is another than the program's.
HALVED_AT = 7


class _SlowAfter(keras.callbacks.Callback):
    """Slows training so that the test can kill a process in mid-epoch.

    Args:
        seconds: Additional time of a step.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        if batch >= KILLED_AT:
            time.sleep(self.seconds)


def train(
    directory: str,
    synchronous: bool,
    killed: bool,
    parts: int = 2,
    restart_limit: float = 0.0,
    save_freq: int = 5,
    until_all_work: bool = False,
) -> dict:
    """Trains or resumes; returns the course of it and the outcome.

    Args:
        directory: Directory of the checkpoints, and of the mark on which the test kills a process.
        synchronous: Argument of the strategy.
        killed: Whether a process is to be killed.
        parts: Parts of the first kernel, on as many servers.
        restart_limit: Argument of the strategy.
        save_freq: Argument of the checkpoints' callback.
        until_all_work: Whether to train afterwards until all workers take part.
    """
    keras.utils.set_random_seed(3)
    strategy = ParameterServerStrategy(
        synchronous=synchronous,
        restart_limit=restart_limit,
        variable_partitioner=lambda shape, dtype: [
            parts if shape[0] == 6 else 1,
            *[1] * (shape.rank - 1),
        ],
    )
    with strategy.scope():
        counted = CountedMean(name="samples")
        # The chief's own variable; the chief is task 0 of its job, as a server may be of its.
        with strategy.extended.colocate_vars_with(counted.rows.value):
            on_chief = tf.Variable(7.0)
    model = classifier(strategy, dropout=0.2, metrics=[counted])
    seen: list[int] = []

    def halve_rate(batch, logs):
        if batch == HALVED_AT:
            model.optimizer.learning_rate = 0.01

    callbacks = [
        tfdml.callbacks.FaultTolerantCheckpoint(f"{directory}/checkpoints", save_freq),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch)),
        keras.callbacks.LambdaCallback(on_train_batch_end=halve_rate),
        Marks(directory, (KILLED_AT,)),
        _SlowAfter(0.1 if killed else 0.0),
    ]
    history = model.fit(
        dataset(), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks
    )
    slots: dict = {}
    model.optimizer.save_own_variables(slots)
    result = {
        "first_step": seen[0],
        "seen": seen,
        "lost": sorted(strategy.connection.link.lost),
        "on_chief": (on_chief.device, float(on_chief.numpy())),
        "outcome": {
            "iterations": int(model.optimizer.iterations.numpy()),
            "samples": history.history["samples"],
            "weights": [w.numpy() for w in model.weights],
            "slots": [np.asarray(slots[str(i)]) for i in range(len(slots))],
        },
    }
    workers: set[int] = set()
    deadline = time.monotonic() + 60
    while until_all_work and workers != {0, 1} and time.monotonic() < deadline:
        model.fit(dataset(), epochs=1, steps_per_epoch=STEPS, verbose=0)
        workers = model.train_function.workers
    return {**result, "workers_after": sorted(workers)}
