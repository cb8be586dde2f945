"""Elastic training with another feature: `elastic_program.py OUT HOSTS RECORDS FEATURE...`.

A rank joins after `JOINS_AT` steps, or three with the feature "hosts": rank 0 then writes HOSTS,
the file that the host discovery prints. If `LOST` is among the features, rank 1 kills itself
`STAYS` steps later. Rank 0 pickles the outcome in OUT.
"""

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf

import tfdml
from tests.strategies.combinations import cases as cases

JOINS_AT, STAYS = 3, 2
LOST = "lost"


class MembershipPlan(keras.callbacks.Callback):
    """Lets a rank join, and kills it."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def on_train_batch_end(self, batch, logs=None):
        self.sizes.append(strategy.size)
        if strategy.size == 1 and len(self.sizes) == JOINS_AT:
            # Atomically: a discovery that finds an empty list considers all hosts lost.
            ranks = 2 if "hosts" in features else 1
            Path(f"{hosts}.new").write_text(f"localhost:{ranks}\n127.0.0.1:{ranks}\n")
            os.replace(f"{hosts}.new", hosts)
            deadline = time.monotonic() + 60
            while not state._commits.hosts_pending and time.monotonic() < deadline:
                time.sleep(0.1)
        if LOST in features and strategy.rank == 1 and batch == JOINS_AT + STAYS:
            time.sleep(0.2)  # Lets the other rank reach this step too.
            os.kill(os.getpid(), signal.SIGKILL)


@tfdml.elastic.run
def train(state: tfdml.elastic.KerasState) -> keras.callbacks.History:
    """Trains with a commit after each step."""
    checkpoint = None
    if "checkpoint_resume" in features:
        checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(Path(out, "run"), save_freq=2)
    given = cases.data_of(features, strategy, records)
    callbacks = [plan, state.committer(steps=1, checkpoint=checkpoint)]
    return model.fit(**given, epochs=1, verbose=0, callbacks=callbacks)


out, hosts, records, *features = sys.argv[1:]
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 4)
plan = MembershipPlan()
with cases.deciding(features):
    strategy = cases.make_strategy(features)
    model = cases.model_of(features, strategy)
    state = tfdml.elastic.KerasState(model)
    history = train(state)
if strategy.rank == 0:
    result = cases.outcome_of(features, model, history)
    Path(out, "result").write_bytes(pickle.dumps(result | {"sizes": plan.sizes}))
