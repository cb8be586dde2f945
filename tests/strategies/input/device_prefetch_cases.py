"""Cases run by ranks: data copied to the devices while steps run."""

import gc
import threading
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.harness import rank_job
from tests.strategies.cases import CLASSES, compiled, data, outcome, seed_ranks_apart
from tfdml.strategies.input.device_prefetch import DevicePrefetcher

ROWS, BATCH = 49, 8


def dataset_of(source: str, rows: int = ROWS) -> dict:
    """Returns the data for `fit`: the same rows on all ranks."""
    x, y = data(rows)
    keras.utils.set_random_seed(5)  # A shuffle's order depends on this seed too.
    if source == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(rows, seed=3).batch(BATCH)
    if source == "unknown length":
        batches = batches.filter(lambda *_: True)
    return {"x": batches}


def trained(source: str, ahead: bool, devices: int, options: dict) -> dict:
    """Trains with rows prefetched to the devices, or copied as needed."""
    seed_ranks_apart()
    strategy = rank_job.strategy(devices)
    strategy.extended.copies_ahead = ahead
    compile_options = {"steps_per_execution": options.pop("steps_per_execution", 1)}
    model = compiled(strategy, **compile_options)
    with mock.patch.object(
        DevicePrefetcher, "_next", autospec=True, side_effect=DevicePrefetcher._next
    ) as read:
        history = model.fit(**dataset_of(source), epochs=3, verbose=0, **options)
    iterations = int(model.optimizer.iterations.numpy())
    return {**outcome(model, history), "iterations": iterations, "read": read.call_count}


def where() -> dict:
    """Returns the devices of the rows and of the row counts that a step receives."""
    strategy = rank_job.strategy(2)
    extended = strategy.extended
    batches = tf.data.Dataset.from_tensor_slices(
        {"x": np.zeros((9, 3), "float32"), "y": np.arange(9), "text": ["a"] * 9}
    ).batch(4)
    local_batches = list(
        DevicePrefetcher(batches.map(extended.split_element), extended.local_devices)
    )
    number = [extended.collective.rank * 2 + i for i in range(2)]
    return {
        "local batches": len(local_batches),
        "rows": {t.device for p in local_batches for t in (p.rows, p.global_rows)},
        "parts": [{p.parts[i][k].device for p in local_batches for k in "xy"} for i in range(2)],
        "text": {p.parts[1]["text"].device for p in local_batches},
        "devices": list(extended.local_devices),
        "y": [p.parts[i]["y"].numpy().tolist() for p in local_batches for i in range(2)],
        "replicas": number,
    }


def devices_of_arrays() -> list[str]:
    """Returns where `fit`'s arrays are put if TensorFlow's default device is not the first CPU."""
    model = compiled(rank_job.strategy(1))
    x, y = data(ROWS)
    convert, found = tf.convert_to_tensor, []

    def recorded(value, *args, **kwargs):
        tensor = convert(value, *args, **kwargs)
        if isinstance(value, np.ndarray) and len(value) == ROWS:
            found.append(tensor.device)
        return tensor

    with tf.device("CPU:1"), mock.patch.object(tf, "convert_to_tensor", recorded):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    return found


def failing(ahead: bool) -> str:
    """Returns the error of data that fail in their third batch."""
    strategy = rank_job.strategy(2)
    strategy.extended.copies_ahead = ahead
    model = compiled(strategy)
    x, y = data(ROWS)

    def checked(x, y):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(y < CLASSES), ["row"])]):
            return tf.identity(x), y

    y[20] = CLASSES
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).map(checked)
    try:
        model.fit(batches, epochs=1, verbose=0)
    except Exception as raised:  # noqa: BLE001 (the error is the case's result)
        return f"{type(raised).__name__}: {raised}"
    return ""


def left_in_the_middle() -> int:
    """Returns the number of threads left of epochs that were interrupted."""
    strategy = rank_job.strategy(2)
    strategy.extended.copies_ahead = True
    model = compiled(strategy)
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", True)
    )
    for _ in range(3):
        model.fit(**dataset_of("dataset"), epochs=2, verbose=0, callbacks=[stop])
        model.stop_training = False
    gc.collect()
    return sum(thread.name.startswith("tfdml-on-devices") for thread in threading.enumerate())
