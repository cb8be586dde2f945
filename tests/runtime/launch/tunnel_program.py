"""Trains a small model in which only rank 0 holds known bytes, and prints the outcome.

    tunnel_program.py KIND

KIND is "horovod", "multi_worker", or "horovod-local", which synchronizes every third step. Rank 0's
bytes are sent to the other rank before the first step.
"""

import hashlib
import os
import sys

import keras
import numpy as np
import psutil

import tfdml

# The bytes that the lab searches for.
MODEL = b"tfdml-clear-text"

# 64 KB: each packet that carries them holds them completely many times.
REPEATS = 4096


class Marked(keras.layers.Layer):
    """Layer that passes its input on and has a non-trainable weight."""

    def build(self, shape):
        self.mark = self.add_weight(shape=(REPEATS * len(MODEL) // 4,), trainable=False)

    def call(self, inputs):
        return inputs


kind, _, is_local = sys.argv[1].partition("-")
local_updates = tfdml.local_updates.LocalSGD(3) if is_local else None
strategy = {
    "horovod": tfdml.HorovodStrategy,
    "multi_worker": tfdml.MultiWorkerMirroredStrategy,
}[kind](local_updates=local_updates)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((32,)), Marked(), keras.layers.Dense(64), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
mark = np.frombuffer(MODEL * REPEATS, "float32")
if strategy.rank == 0:
    model.layers[0].mark.assign(mark)
numbers = np.random.default_rng(1)
x = numbers.normal(size=(64, 32)).astype("float32")
y = numbers.normal(size=(64, 1)).astype("float32")
model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
weights = model.get_weights()
digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
listening = {
    c.laddr.ip for c in psutil.Process(os.getpid()).net_connections("tcp") if c.status == "LISTEN"
}
arrived = weights[0].tobytes() == mark.tobytes()
print(f"TRAINED rank {strategy.rank} {digest} {arrived} {','.join(sorted(listening))}", flush=True)
