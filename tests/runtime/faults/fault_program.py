"""Training script in which one rank fails at a chosen point.

    fault_program.py DIRECTORY KIND FAULT WHERE RANK [WIDTH]

It records in DIRECTORY when the fault happens. If WHERE is an exchange of gradients that are summed
by hosts, ranks 0 and 1 seem to be on one host and rank 2 on another. If it is an exchange of parts,
the optimizer's state is divided among the ranks; if it is one of rows, a table is. If it is
"round", ranks take steps of their own, and the fault comes between two synchronizations; if it is
"synchronization", in one. If it is "stage", each rank has two stages, and the fault comes in the
last.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.collectives.hosts import Hosts
from tfdml.collectives.observed_collective import ObservedCollective
from tfdml.compression.exchange import by_hosts, compressed_aggregator
from tfdml.local_updates import LocalSGD
from tfdml.strategies.keras_seam.local_updates.fragment import Fragment
from tfdml.strategies.replicas import extended

directory, kind, fault, where, faulty = sys.argv[1:6]
width = int(sys.argv[6]) if len(sys.argv) > 6 else 8


def do_fault() -> None:
    """Triggers the requested fault on the requested rank."""
    if strategy.rank != int(faulty):
        return
    Path(directory, f"fault{strategy.rank}").write_text(str(time.time()))
    if fault == "raise":
        raise ValueError("the mistake of this test")
    if fault == "exit":
        os._exit(3)
    if fault == "sys.exit":
        sys.exit(0)
    os.kill(os.getpid(), signal.Signals[fault])
    if fault == "SIGSTOP":
        time.sleep(0.1)


class At(keras.callbacks.Callback):
    """Triggers the fault when training reaches a point."""

    def on_train_begin(self, logs=None):
        if where == "train_begin":
            do_fault()
        if where == "exchange":
            threading.Thread(target=in_exchange, daemon=True).start()

    def on_train_batch_end(self, batch, logs=None):
        if where in ("batch_end", "alone", "round") and batch == 3:
            do_fault()
            time.sleep(600 if where == "alone" else 0)

    def on_test_batch_end(self, batch, logs=None):
        if where == "validation":
            do_fault()

    def on_epoch_end(self, epoch, logs=None):
        if where == "epoch_end":
            do_fault()
        if where in ("save", "save_table"):
            if epoch == 1:
                do_fault()
            self.model.save(os.path.join(directory, "model.keras"))

    def on_predict_batch_end(self, batch, logs=None):
        if where == "predict":
            do_fault()


def in_exchange() -> None:
    """Triggers the fault while the main thread is in a step, after some steps."""
    activity = strategy.extended.guard.activity
    while activity.step < 3 or activity.waits_for is None:
        time.sleep(0.0005)
    do_fault()


class FaultyStep(keras.Sequential):
    """Model whose train step triggers the fault in the graph."""

    def train_step(self, data):
        if where == "train_step":
            called = tf.numpy_function(lambda: (do_fault(), np.float32(0))[1], [], tf.float32)
            with tf.control_dependencies([called]):
                data = tf.nest.map_structure(tf.identity, data)
        return super().train_step(data)


class FaultyLayer(keras.layers.Dense):
    """Layer that triggers the fault in a later step."""

    def call(self, inputs):
        def begin() -> np.float32:
            guard = strategy.extended.guard
            if guard is not None and guard.activity.step >= 3:
                do_fault()
            return np.float32(0)

        with tf.control_dependencies([tf.numpy_function(begin, [], tf.float32)]):
            return super().call(tf.identity(inputs))


# The exchanges of gradients that are summed by hosts.
BY_HOSTS = ("within", "to_owner", "to_all", "to_host")


def sum_by_hosts_until_the_fault() -> None:
    """Has gradients summed by hosts, with the fault before one of the exchanges of a later step."""
    mock.patch.object(extended, "gather_hosts", return_value=Hosts(((0, 1), (2,)))).start()
    mock.patch.object(compressed_aggregator, "is_faster_by_hosts", return_value=True).start()
    exchanged = by_hosts.exchanged

    def faulty_exchange(exchange, payloads, name):
        def begin() -> np.float32:
            if strategy.extended.guard.activity.step >= 3:
                do_fault()
            return np.float32(0)

        if name.endswith(where):
            with tf.control_dependencies([*payloads, tf.numpy_function(begin, [], tf.float32)]):
                payloads = [tf.identity(payload) for payload in payloads]
        return exchanged(exchange, payloads, name)

    mock.patch.object(by_hosts, "exchanged", faulty_exchange).start()


# The halves of an exchange of parts, by the collective's method; and a save, which gathers slots.
HALVES = {"to_parts": "all_to_all_rows", "to_wholes": "all_gather_rows"}
DIVIDED = (*HALVES, "save", "save_alone")


def exchange_parts_until_the_fault() -> None:
    """Has the fault before one half of a later step's exchange of parts."""
    original = getattr(ObservedCollective, HALVES[where])

    def faulty_exchange(collective, tensor, counts, name):
        def begin() -> np.float32:
            if strategy.extended.guard.activity.step >= 3:
                do_fault()
            return np.float32(0)

        with tf.control_dependencies([tensor, tf.numpy_function(begin, [], tf.float32)]):
            tensor = tf.identity(tensor)
        return original(collective, tensor, counts, name)

    mock.patch.object(ObservedCollective, HALVES[where], faulty_exchange).start()


# The exchanges of rows of a table, by the begin of their names; and a save, which gathers it.
ROWS = ("table_ids", "table_rows", "table_gradients")
DEALT = (*ROWS, "save_table", "lookup_alone")


def exchange_rows_until_the_fault() -> None:
    """Has the fault before one of the exchanges of rows of a later step."""
    original = ObservedCollective.all_to_all_ragged

    def faulty_exchange(collective, tensor, counts, name):
        def begin() -> np.float32:
            if strategy.extended.guard.activity.step >= 3:
                do_fault()
            return np.float32(0)

        if name.startswith(where):
            with tf.control_dependencies([tensor, tf.numpy_function(begin, [], tf.float32)]):
                tensor = tf.identity(tensor)
        return original(collective, tensor, counts, name)

    mock.patch.object(ObservedCollective, "all_to_all_ragged", faulty_exchange).start()


def synchronize_until_the_fault() -> None:
    """Has the fault before the exchange of a later synchronization."""
    original = Fragment.synchronize

    def faulty_synchronize(fragment, fraction):
        def begin() -> np.float32:
            if strategy.extended.guard.activity.step >= 3:
                do_fault()
            return np.float32(0)

        with tf.control_dependencies([tf.numpy_function(begin, [], tf.float32)]):
            fraction = tf.identity(fraction)
        return original(fragment, fraction)

    mock.patch.object(Fragment, "synchronize", faulty_synchronize).start()


def sharding() -> tfdml.Sharding | None:
    """Returns what is divided among the ranks."""
    if where in DEALT:
        return tfdml.Sharding(optimizer_state=False, embeddings=True, min_embedding_bytes=0)
    return tfdml.Sharding() if where in DIVIDED else None


def batches():
    """Yields rows, one by one; data function that may fail."""
    for row in range(96):
        if where == "data" and row == 40:
            do_fault()
        yield np.ones(6, "float32"), np.ones(3, "float32")


if where in BY_HOSTS:
    sum_by_hosts_until_the_fault()
if where in HALVES:
    exchange_parts_until_the_fault()
if where in ROWS:
    exchange_rows_until_the_fault()
if where == "synchronization":
    synchronize_until_the_fault()
options = {
    "silence_limit": 3.0,
    "compression": "int8" if where in BY_HOSTS else None,
    "sharding": sharding(),
}
if where == "stage":
    cpus = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpus[0], two)
    options["devices"] = [["CPU:0", "CPU:1"]]
    options["pipeline"] = tfdml.PipelineParallel(2)
if where in ("round", "synchronization"):
    options["local_updates"] = LocalSGD(1000 if where == "round" else 2)
if kind == "horovod":
    strategy = tfdml.HorovodStrategy(**options)
else:
    strategy = tfdml.MultiWorkerMirroredStrategy(**options)
if where == "before_the_model":
    do_fault()
with strategy.scope():
    first = [keras.layers.Dense(width)]
    if where in DEALT:
        first = [keras.layers.Embedding(50, 4), keras.layers.Flatten()]
    last = FaultyLayer(3) if where == "stage" else keras.layers.Dense(3)
    kind_of_model = keras.Sequential if where == "stage" else FaultyStep
    model = kind_of_model([keras.layers.Input((6,)), *first, last])
    model.compile("adam" if where in DIVIDED else "sgd", "mse", run_eagerly=False)
signature = (tf.TensorSpec((6,)), tf.TensorSpec((3,)))
dataset = tf.data.Dataset.from_generator(batches, output_signature=signature).batch(12)
if where in ("round", "synchronization"):
    rows = tf.ones((96, 6)), tf.ones((96, 3))
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(12)
x = np.ones((48, 6), "float32")
y = np.ones((48, 3), "float32")
if where == "evaluate_alone" and strategy.rank == int(faulty):
    Path(directory, "fault").write_text(str(time.time()))
    model.evaluate(x, y, verbose=0)
epochs = 1 if where in ("save_alone", "lookup_alone") else 30
model.fit(
    dataset, validation_data=(x, y), validation_batch_size=12, epochs=epochs, verbose=0,
    callbacks=[At()],
)  # fmt: skip
if where == "save_alone" and strategy.rank == int(faulty):
    Path(directory, "fault").write_text(str(time.time()))
    model.save(os.path.join(directory, "model.keras"))
if where == "lookup_alone" and strategy.rank == int(faulty):
    Path(directory, "fault").write_text(str(time.time()))
    model(x)
model.predict(x, batch_size=12, verbose=0, callbacks=[At()])
print("done", flush=True)
