"""Training in stages, of which a rank kills itself once, in the middle of a step.

    killed_program.py DIRECTORY RANK STEP

Rank RANK kills itself in the step after STEP, unless DIRECTORY says that it did. At the end rank 0
writes the weights and slots to DIRECTORY.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.strategies.pipeline import cases, lives
from tfdml.topology import launched

directory, faulty, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
steps = 0


def kill_once(loss: np.ndarray) -> np.ndarray:
    """Kills this process, once, when the second microbatch of a step has been through the model."""
    global steps
    steps += 1
    mark = directory / "killed"
    is_due = steps == cases.MICROBATCHES * step + 2 and not mark.exists()
    if launched().rank == faulty and is_due:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss


class Faulty(keras.losses.Loss):
    """Cross-entropy that ends its rank."""

    def call(self, y_true, y_pred):
        """Returns the loss of each row."""
        loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        passed = tf.numpy_function(kill_once, [tf.stop_gradient(loss)], loss.dtype)
        with tf.control_dependencies([passed]):
            return tf.identity(loss)


cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
lives.use_float64()
stages = [["dense", "dense_1"], ["dense_2", "dense_3"]]
with cases.strategy(cases.ONE_GROUP, stages=stages).scope():
    model = cases.compiled("residual", loss=Faulty())
checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(str(directory / "run"), save_freq=2)
result = lives.fit(model, "residual", callbacks=[checkpoint])
if launched().rank == 0:
    np.savez(directory / "end.npz", *result["weights"], *result["slots"])
