"""Training script that resumes from checkpoints, and waits once for what ends it.

    resuming_program.py DIRECTORY KIND [waits]

The chief prints a digest of the weights at the end. With "waits" rank 1 creates DIRECTORY/waits in
the middle of its first run, and waits for a signal.
"""

import hashlib
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tfdml

directory, kind = Path(sys.argv[1]), sys.argv[2]
strategy = tfdml.HorovodStrategy() if kind == "horovod" else tfdml.MultiWorkerMirroredStrategy()


class WaitsOnce(keras.callbacks.Callback):
    """Makes rank 1 wait for a signal in its first run."""

    def on_train_batch_end(self, batch, logs=None):
        mark = directory / "waits"
        if "waits" in sys.argv and (strategy.rank, batch) == (1, 5) and not mark.exists():
            mark.touch()
            signal.pause()


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
callbacks = [
    tfdml.callbacks.FaultTolerantCheckpoint(str(directory / "checkpoints"), save_freq=2),
    WaitsOnce(),
]
model.fit(x, x.sum(1), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
if strategy.is_chief:
    weights = b"".join(w.tobytes() for w in model.get_weights())
    print(f"WEIGHTS {hashlib.sha256(weights).hexdigest()} on {strategy.size}", flush=True)
