"""A notebook's session: cells that are interrupted by Ctrl-C and run again.

Run with the directory of the checkpoints, how the second cell gets its model ("same" or "rebuilt"),
and the step after which the first cell is interrupted. Prints a line of JSON.
"""

import json
import os
import signal
import sys

import keras
import numpy as np

import tfdml

directory, second, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


class Interrupts(keras.callbacks.Callback):
    """Sends this process SIGINT after a step, as Jupyter's stop button does."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        Interrupts.steps += 1
        if Interrupts.steps == step:
            os.kill(os.getpid(), signal.SIGINT)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.3)])
    model.compile("adam", "mse")
    return model


def cell(model: keras.Model, name: str) -> list[int]:
    """Trains as the documentation does: the callback is made within the call of `fit`."""
    y = np.tile(x, 2)
    return model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[
        Interrupts(), tfdml.callbacks.FaultTolerantCheckpoint(os.path.join(directory, name))
    ]).epoch  # fmt: skip


model = build()
try:
    cell(model, "interrupted")
except KeyboardInterrupt:
    if second == "rebuilt":
        model = build()
    # A `fit` within a handler of an exception is one that ends well.
    epochs, weights = cell(model, "interrupted"), model.get_weights()
    # It had finished: once more is another one, which trains on.
    cell(model, "interrupted")
whole = build()
cell(whole, "whole")
same = all((a == b).all() for a, b in zip(weights, whole.get_weights(), strict=True))
trained = int(model.optimizer.iterations.numpy())
print(json.dumps({"epochs": epochs, "same": same, "trained": trained}))
