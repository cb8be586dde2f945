"""Rank of `tools.bench.recovery`, which trains and may kill itself.

Rank 1 kills itself at step 55 and records the time; rank 0 records the end of each step. The state
is saved every 10 steps.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from tools.bench.harness import start

WIDTH, ROWS, STEPS, FATAL, EVERY = 256, 64, 100, 55, 10


class Clock:
    """Recorder of the times of steps, which also kills rank 1."""

    def __init__(self, directory: str):
        self._death = Path(directory, "death")
        self._steps = Path(directory, "steps")
        self._moments: list[float] = []

    def step(self, rank: int, number: int) -> None:
        """Records the end of step `number`, from 1."""
        if rank == 1 and number == FATAL and not self._death.exists():
            time.sleep(0.5)  # The other one is in the next step by then.
            self._death.write_text(json.dumps(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            self._moments.append(time.time())
            if self._death.exists():
                self._steps.write_text(json.dumps(self._moments))


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of all steps."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS * STEPS, WIDTH)).astype("float32")
    return x, numbers.integers(0, 10, len(x))


def fit(strategy, clock: Clock, callback=None) -> None:
    """Trains by `fit`; elastic, if there is no callback."""
    import keras

    import tfdml

    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)

    def step(batch, logs):
        clock.step(strategy.rank, batch + 1)

    ticks = keras.callbacks.LambdaCallback(on_train_batch_end=step)
    x, y = samples()

    @tfdml.elastic.run
    def train(state):
        own = callback or state.committer(steps=EVERY)
        model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[ticks, own])

    train(tfdml.elastic.KerasState(model))


def loop(clock: Clock) -> None:
    """Trains by a custom loop, as in Horovod's documentation."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.random.set_seed(1)
    sizes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
    weights = [tf.Variable(tf.random.normal(size, stddev=0.06)) for size in sizes]
    x, y = samples()

    @hvd.elastic.run
    def train(state):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                hidden = tf.nn.relu(tf.nn.relu(x @ weights[0]) @ weights[1])
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden @ weights[2])
                loss = tf.reduce_mean(loss)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                # Not grouped: Horovod's loop takes the errors of grouped operations as fatal.
                weight.assign_sub(0.01 * hvd.allreduce(gradient))
            return loss

        while state.number < STEPS:
            begin = state.number * ROWS
            mine = slice(begin + hvd.rank(), begin + ROWS, hvd.size())
            float(step(tf.constant(x[mine]), tf.constant(y[mine])))
            state.number += 1
            clock.step(hvd.rank(), state.number)
            if state.number % EVERY == 0:
                state.commit()

    train(hvd.elastic.TensorFlowState(variables=weights, number=0))


def main(
    way: Annotated[str, typer.Argument(help="fit, loop or restart.")],
    directory: Annotated[str, typer.Argument(help="Where moments are noted.")],
) -> None:
    """Trains."""
    clock = Clock(directory)
    if way == "loop":
        return loop(clock)
    import tfdml

    if way == "fit":
        return fit(tfdml.HorovodStrategy(), clock)
    saved = tfdml.callbacks.FaultTolerantCheckpoint(Path(directory, "run"), save_freq=EVERY)
    return fit(tfdml.MultiWorkerMirroredStrategy(), clock, saved)


if __name__ == "__main__":
    start(__doc__, main)
