"""Training script of one of KerasHub's models, named by its argument: small, with random weights.

It needs KerasHub, and the repository on Python's path.
"""

import sys

import keras
import numpy as np

import tfdml
from tests.strategies.architectures import hub_program

strategy = tfdml.MultiWorkerMirroredStrategy()
# The masks of `Dropout` must be those of one process, too.
hub_program.TRANSFORMER["dropout"] = 0.1
with strategy.scope():
    task = hub_program.MODELS[sys.argv[1]](np.random.default_rng(0))
    task.model.compile(keras.optimizers.AdamW(1e-3), **task.compiled)
task.model.fit(task.x, task.y, sample_weight=task.weights, batch_size=8)
