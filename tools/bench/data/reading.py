"""Readers of the same samples in several libraries, timed by `tools.bench.data`.

Each function returns a callable that reads an epoch and returns its number of samples. All shuffle;
those of `tf.data` and tfdml yield batches of parsed tensors, the others batches of NumPy arrays.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

WIDTH, BATCH, SHARDS, BUFFER = 32, 256, 8, 16_384
Epoch = Callable[[], int]


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values and labels that all libraries store."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, WIDTH)).astype(np.float32), rng.integers(0, 10, count)


def ours(directory: str, **options) -> Epoch:
    """Reads by `read_tfrecords` with its default shuffling, resumable at any batch."""
    import tfdml

    pipeline = tfdml.data.read_tfrecords(directory, BATCH, label="y", seed=1, **options)
    return lambda: sum(len(y) for _, y in pipeline)


def hand_tuned(directory: str) -> Epoch:
    """Reads by the fastest `tf.data` pipeline that we know, which cannot be resumed cheaply."""
    import tensorflow as tf

    paths = sorted(str(p) for p in Path(directory).glob("*.tfrecord"))
    spec = {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "x": tf.io.FixedLenFeature([WIDTH], tf.float32),
        "y": tf.io.FixedLenFeature([], tf.int64),
    }
    data = (
        tf.data.Dataset.from_tensor_slices(paths)
        .shuffle(len(paths))
        .interleave(
            tf.data.TFRecordDataset,
            cycle_length=SHARDS,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=False,
        )
        .shuffle(BUFFER)
        .batch(BATCH)
        .map(lambda r: tf.io.parse_example(r, spec), num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda: sum(len(batch["y"]) for batch in data)


def by_tfds(directory: str) -> Epoch:
    """Reads the same files by TensorFlow Datasets."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    data = tfds.builder_from_directory(directory).as_dataset(split="train", shuffle_files=True)
    data = data.shuffle(BUFFER).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    return lambda: sum(len(batch["y"]) for batch in data)


def by_webdataset(directory: str, x: np.ndarray, y: np.ndarray) -> Epoch:
    """Reads raw arrays in tar files by webdataset."""
    import webdataset as wds

    pattern = os.path.join(directory, "wds-%02d.tar")
    with wds.ShardWriter(pattern, maxcount=-(-len(x) // SHARDS), verbose=0) as sink:
        for i in range(len(x)):
            sink.write({"__key__": f"{i:08d}", "x": x[i].tobytes(), "y": y[i].tobytes()})
    paths = sorted(str(p) for p in Path(directory).glob("wds-*.tar"))

    def epoch() -> int:
        data = wds.WebDataset(paths, shardshuffle=len(paths)).shuffle(BUFFER).to_tuple("x", "y")
        count, batch = 0, []
        for sample in data:
            batch.append(sample)
            if len(batch) == BATCH:
                np.frombuffer(b"".join(s[0] for s in batch), np.float32).reshape(-1, WIDTH)
                np.frombuffer(b"".join(s[1] for s in batch), np.int64)
                count, batch = count + BATCH, []
        return count + len(batch)

    return epoch


def _array_record(directory: str, x: np.ndarray, y: np.ndarray) -> str:
    from array_record.python import array_record_module

    path = os.path.join(directory, "all.array_record")
    if not os.path.exists(path):
        writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
        for i in range(len(x)):
            writer.write(x[i].tobytes() + y[i].tobytes())
        writer.close()
    return path


def by_array_record(directory: str, x: np.ndarray, y: np.ndarray) -> Epoch:
    """Reads raw arrays by array_record, a batch of random positions at a time."""
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(_array_record(directory, x, y))

    def epoch() -> int:
        order, count = np.random.default_rng(0).permutation(len(x)), 0
        for begin in range(0, len(x), BATCH):
            records = reader.read(order[begin : begin + BATCH].tolist())
            table = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
            table[:, : 4 * WIDTH].copy().view(np.float32)
            table[:, 4 * WIDTH :].copy().view(np.int64)
            count += len(records)
        return count

    return epoch


def by_grain(directory: str, x: np.ndarray, y: np.ndarray) -> Epoch:
    """Reads by grain over array_record: shuffled and resumable."""
    import grain.python as grain

    source = grain.ArrayRecordDataSource(_array_record(directory, x, y))

    def decoded(record: bytes) -> tuple:
        return np.frombuffer(record, np.float32, WIDTH), np.frombuffer(record, np.int64, 1, 128)[0]

    data = grain.MapDataset.source(source).shuffle(seed=1).map(decoded).batch(BATCH)

    def epoch() -> int:
        return sum(len(y) for _, y in data.to_iter_dataset())

    return epoch


def peers(directory: str, data: str, x: np.ndarray, y: np.ndarray) -> dict[str, Epoch]:
    """Returns the readers of all installed libraries, ours first.

    Args:
        directory: Directory for the other libraries' files.
        data: Data set in TFRecords.
        x: Values, float32 of shape `[samples, WIDTH]`.
        y: Labels, int64 of shape `[samples]`.
    """
    found = {"read_tfrecords": ours(data), "hand-tuned tf.data": hand_tuned(data)}
    for name, make in {
        "tfds": lambda: by_tfds(data),
        "webdataset": lambda: by_webdataset(directory, x, y),
        "array_record": lambda: by_array_record(directory, x, y),
        "grain": lambda: by_grain(directory, x, y),
    }.items():
        try:
            found[name] = make()
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
    return found
