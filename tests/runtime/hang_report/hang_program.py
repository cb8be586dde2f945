"""Training script in which one rank hangs, or makes the others hang, after some steps.

    hang_program.py DIRECTORY KIND FAULT RANK

It creates DIRECTORY/fault when the fault is about to happen.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdml

directory, kind, fault, faulty = sys.argv[1:]
# Steps before the fault.
BEFORE = 5


class Hanging(keras.callbacks.Callback):
    """Hangs, or ends this rank, after some steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == BEFORE and is_faulty:
            Path(directory, "fault").touch()
            hang()


def hang() -> None:
    """Does what the test asks for; faults of the step are in `ExchangingStep`."""
    if fault == "sleep":
        time.sleep(600)
    elif fault == "lock":
        lock = threading.Lock()
        with lock, lock:
            pass
    elif fault == "gil":
        # Unlike other functions of C, those of `PyDLL` keep the interpreter's lock.
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif fault.startswith("SIG"):
        time.sleep(2.0)  # A heartbeat tells where it is.
        os.kill(os.getpid(), signal.Signals[fault])
        time.sleep(0.1)


class ExchangingStep(keras.Sequential):
    """Model whose step makes two exchanges of its own, one after the other."""

    def train_step(self, data):
        names = ["first", "second"]
        if fault == "swap" and is_faulty:
            names.reverse()
        # TensorFlow would exchange a constant once, and nothing that the step does not need.
        value = tf.reshape(1e-3 * tf.reduce_mean(data[0]), [1])
        for name in names:
            value = self._exchange(value, name)
        return super().train_step(tf.nest.map_structure(lambda rows: rows + value, data))

    def _exchange(self, value: tf.Tensor, name: str) -> tf.Tensor:
        def exchange() -> tf.Tensor:
            return strategy.extended.collective.all_reduce([value], name)[0]

        if fault != "skip" or not is_faulty or name != "first":
            return exchange()
        is_due = steps.assign_add(1) == BEFORE + 1
        return tf.cond(is_due, lambda: tf.identity(value), exchange)


if kind == "horovod":
    strategy = tfdml.HorovodStrategy(silence_limit=3.0)
else:
    strategy = tfdml.MultiWorkerMirroredStrategy(silence_limit=3.0)
is_faulty = strategy.rank == int(faulty)
steps = tf.Variable(0, dtype=tf.int64)
with strategy.scope():
    model = ExchangingStep([keras.layers.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
if fault in ("skip", "swap") and is_faulty:
    Path(directory, "fault").touch()
rows = np.ones((192, 6), "float32")
model.fit(rows, rows[:, :3], batch_size=12, epochs=2, verbose=0, callbacks=[Hanging()])
print("done", flush=True)
