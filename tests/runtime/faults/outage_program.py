"""Training script whose host may be cut off, in the network lab, after some steps.

    outage_program.py DIRECTORY KIND CODEC SILENCE_LIMIT

It creates DIRECTORY/begun when training is under way; the lab's outages begin then. At its end it
prints the longest step, and the digest of the weights.
"""

import hashlib
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfdml

directory, kind, codec, silence_limit = sys.argv[1:]


class Begun(keras.callbacks.Callback):
    """Says when training is under way, and finds the longest step."""

    def __init__(self):
        super().__init__()
        self.last, self.longest, self.steps = 0.0, 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        self.steps += 1
        if self.steps > 5:
            self.longest = max(self.longest, now - self.last)
            # These steps take at least 5 s together, so that an outage finds training under way.
            time.sleep(0.05)
        elif self.steps == 5:
            Path(directory, "begun").touch()
        self.last = now


chosen = tfdml.HorovodStrategy if kind == "horovod" else tfdml.MultiWorkerMirroredStrategy
strategy = chosen(
    compression=None if codec == "none" else codec, silence_limit=float(silence_limit)
)
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
rows = np.random.default_rng(1).normal(size=(105 * 4, 6)).astype("float32")
begun = Begun()
model.fit(rows, rows[:, :3], batch_size=4, verbose=0, callbacks=[begun])
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
print(f"done {strategy.rank} {begun.longest:.1f} {digest}", flush=True)
