"""Times pipelines and conversions beside their peers, in turn in one run.

    .venv/bin/python tools/bench_data.py [--write tools/benchmarks/data.md]

Reading: small records of 32 float32 numbers, an id and a label, shuffled and batched, against a
hand-tuned `tf.data` pipeline (parallel interleave, shuffle, batch, then `parse_example`),
TensorFlow Datasets on the same files, webdataset and array_record on the same samples, without
parsing, where they are installed.
Writing: a CSV of the same samples against a plain loop over `TFRecordWriter`. Peers run in turn,
several times; the machine's load hits all alike.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

WIDTH, BATCH, SHARDS, BUFFER = 32, 256, 8, 16_384


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers and labels that all store."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, WIDTH)).astype(np.float32), rng.integers(0, 10, count)


def ours(directory: str) -> Callable[[], int]:
    """Returns what reads an epoch by `read_tfrecords`."""
    import tfdml

    pipeline = tfdml.data.read_tfrecords(directory, BATCH, label="y", seed=1)

    def epoch() -> int:
        return sum(len(y) for _, y in pipeline)

    return epoch


def hand_tuned(directory: str) -> Callable[[], int]:
    """Returns what reads an epoch by the fastest pipeline of `tf.data` that we know."""
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


def tfds_reading(directory: str) -> Callable[[], int]:
    """Returns what reads an epoch by TensorFlow Datasets."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    data = tfds.builder_from_directory(directory).as_dataset(split="train", shuffle_files=True)
    data = data.shuffle(BUFFER).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    return lambda: sum(len(batch["y"]) for batch in data)


def webdataset_reading(x: np.ndarray, y: np.ndarray, directory: str) -> Callable[[], int]:
    """Returns what reads an epoch by webdataset, of raw arrays."""
    import webdataset as wds

    pattern = os.path.join(directory, "wds-%02d.tar")
    with wds.ShardWriter(pattern, maxcount=-(-len(x) // SHARDS), verbose=0) as sink:
        for i in range(len(x)):
            sink.write(
                {"__key__": f"{i:08d}", "x": x[i].tobytes(), "y": int(y[i]).to_bytes(8, "little")}
            )
    paths = sorted(str(p) for p in Path(directory).glob("wds-*.tar"))

    def epoch() -> int:
        data = wds.WebDataset(paths, shardshuffle=len(paths)).shuffle(1000).to_tuple("x", "y")
        count, batch = 0, []
        for sample in data:
            batch.append(sample)
            if len(batch) == BATCH:
                np.frombuffer(b"".join(s[0] for s in batch), np.float32).reshape(-1, WIDTH)
                np.frombuffer(b"".join(s[1] for s in batch), np.int64)
                count, batch = count + BATCH, []
        return count + len(batch)

    return epoch


def array_record_reading(directory: str, x: np.ndarray, y: np.ndarray) -> Callable[[], int]:
    """Returns what reads an epoch by array_record, of raw arrays, in random order."""
    from array_record.python import array_record_module

    path = os.path.join(directory, "all.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for i in range(len(x)):
        writer.write(x[i].tobytes() + int(y[i]).to_bytes(8, "little"))
    writer.close()
    reader = array_record_module.ArrayRecordReader(path)

    def epoch() -> int:
        order, count = np.random.default_rng(0).permutation(len(x)), 0
        for begin in range(0, len(x), BATCH):
            records = reader.read(order[begin : begin + BATCH].tolist())
            np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
            count += len(records)
        return count

    return epoch


def plain_writer(path: str, output: str) -> Callable[[], int]:
    """Returns what converts a CSV by the loop that tutorials show."""
    import csv

    import tensorflow as tf

    def convert() -> int:
        count = 0
        writers = [tf.io.TFRecordWriter(f"{output}-{i}") for i in range(SHARDS)]
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                feature = {
                    name: tf.train.Feature(float_list=tf.train.FloatList(value=[float(cell)]))
                    if name not in ("id", "y")
                    else tf.train.Feature(int64_list=tf.train.Int64List(value=[int(cell)]))
                    for name, cell in row.items()
                }
                one = tf.train.Example(features=tf.train.Features(feature=feature))
                writers[count % SHARDS].write(one.SerializeToString())
                count += 1
        for writer in writers:
            writer.close()
        return count

    return convert


def our_writer(path: str, output: str) -> Callable[[], int]:
    """Returns what converts a CSV by two processes; their start is within the time."""
    from tfdml.data.convert import convert
    from tfdml.data.plan import Options
    from tfdml.data.sources.opening import open_source

    def run() -> int:
        options = Options(shards=SHARDS)
        manifest = convert(open_source([path]), output, options, processes=2, overwrite=True)
        return manifest.counts["written"]

    return run


def in_turn(peers: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Runs all in turn; returns their median rates in samples a second."""
    rates: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 1):
        turn = list(peers.items())
        for name, run in turn if number % 2 else turn[::-1]:
            begin = time.perf_counter()
            count = run()
            rates[name].append(count / (time.perf_counter() - begin))
    # The first round warms up.
    return {name: statistics.median(found[1:]) for name, found in rates.items()}


def first_batch(directory: str, rounds: int) -> dict[str, float]:
    """Returns the median seconds from the call to the first batch: cold, and in mid-epoch."""
    import tfdml

    whole = tfdml.data.read_tfrecords(directory, BATCH, label="y", seed=1)
    states = {"cold": None, "resumed": whole.state_at(3, whole.steps_per_epoch // 2)}
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(rounds + 1):
        for name, state in states.items():
            begin = time.perf_counter()
            pipeline = tfdml.data.read_tfrecords(directory, BATCH, label="y", seed=1, state=state)
            next(iter(pipeline))
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    return medians | {"state bytes": len(json.dumps(states["resumed"]))}


def conditions() -> str:
    """Returns the versions, the machine, its load and the date."""
    from importlib.metadata import version

    versions = ", ".join(f"{p} {version(p)}" for p in ("tensorflow-cpu", "numpy"))
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()}"
    return f"{versions}, Python {platform.python_version()}; {machine}; {date.today()}"


def main(
    count: int = 200_000, rounds: int = 5, write: Annotated[Path | None, typer.Option()] = None
):
    """Times reading and writing, and prints the tables."""
    from tfdml.data import write_tfrecords

    x, y = samples(count)
    with tempfile.TemporaryDirectory(prefix="tfdml-bench-") as directory:
        data = os.path.join(directory, "data")
        rows = ({"id": i, "x": x[i], "y": int(y[i])} for i in range(count))
        from tfdml.data import tfds_metadata

        tfds_metadata.write(write_tfrecords(rows, data, shards=SHARDS))
        peers = {"read_tfrecords": ours(data), "hand-tuned tf.data": hand_tuned(data)}
        for name, make in {
            "tfds": lambda: tfds_reading(data),
            "webdataset": lambda: webdataset_reading(x, y, directory),
            "array_record": lambda: array_record_reading(directory, x, y),
        }.items():
            try:
                peers[name] = make()
            except ImportError as missing:
                print(f"{name} is left out: {missing}")
        reading = in_turn(peers, rounds)
        batch = first_batch(data, rounds)
        path = os.path.join(directory, "a.csv")
        head = ",".join(["id", "y", *(f"x{i}" for i in range(4))])
        table = np.column_stack([np.arange(count), y, x[:, :4]])
        np.savetxt(path, table, "%d,%d,%.4f,%.4f,%.4f,%.4f", header=head, comments="")
        writing = in_turn(
            {
                "convert, 2 processes": our_writer(path, os.path.join(directory, "out")),
                "TFRecordWriter loop": plain_writer(path, os.path.join(directory, "plain")),
            },
            max(1, rounds // 2),
        )
    lines = [f"Measured with {conditions()}, {count} samples, medians of {rounds} rounds.", ""]
    for title, rates in (("Reading", reading), ("Converting a CSV of 6 columns", writing)):
        ours_rate = next(iter(rates.values()))
        lines += [f"| {title} | samples/s | ours by this |", "| --- | --- | --- |"]
        lines += [f"| {n} | {r:,.0f} | {ours_rate / r:.2f} |" for n, r in rates.items()] + [""]
    lines.append(
        f"First batch: {batch['cold']:.2f} s cold, {batch['resumed']:.2f} s resumed in mid-epoch "
        f"({batch['resumed'] / batch['cold']:.2f}); the state is {batch['state bytes']} bytes."
    )
    text = "\n".join(lines) + "\n"
    print(text)
    if write is not None:
        write.write_text(text)


if __name__ == "__main__":
    typer.run(main)
