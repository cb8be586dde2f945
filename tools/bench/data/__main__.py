"""Times pipelines and conversions against their peers, alternating in one run.

    python -m tools.bench.data --what reading --count 20000
    python -m tools.bench.data --what writing --count 4000
    python -m tools.bench.data --what images --count 400

Reading: small records of 32 float32 numbers, an id and a label, shuffled, in batches, against a
hand-tuned `tf.data` pipeline (parallel interleave, shuffle, batch, then `parse_example`),
TensorFlow Datasets on the same files, and webdataset, array_record and grain on the same samples,
where they are installed. Writing: a CSV of 6 columns, against a loop over `TFRecordWriter` and a
builder of TensorFlow Datasets. Images: a folder of JPEGs, against the decoder alone. Peers run in
turn, several times, so that the machine's load affects all equally.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.data import reading, writing
from tools.bench.harness import conditions, start

PACKAGES = ("tensorflow-cpu", "numpy", "pyarrow", "pillow", "tensorflow-datasets", "webdataset")
PACKAGES += ("array_record", "grain")


def in_turn(peers: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Runs all peers in turn; returns rates in samples per second, without the first round."""
    rates: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 1):
        turn = list(peers.items())
        for name, run in turn if number % 2 else turn[::-1]:
            begin = time.perf_counter()
            count = run()
            rates[name].append(count / (time.perf_counter() - begin))
    return {name: found[1:] for name, found in rates.items()}


def rows_of(title: str, rates: dict[str, list[float]]) -> list[str]:
    """Returns a table of median rates, and the ratio of the first one's rate to each."""
    ours = next(iter(rates.values()))
    lines = ["", f"| {title} | samples/s | ours by this |", "| --- | --- | --- |"]
    for name, found in rates.items():
        # All peers of a round had about the same load.
        ratio = statistics.median(a / b for a, b in zip(ours, found, strict=True))
        lines.append(f"| {name} | {statistics.median(found):,.0f} | {ratio:.2f} |")
    return lines


def first_batch(directory: str, rounds: int) -> str:
    """Returns a sentence on the time to the first batch: cold, and resumed in mid-epoch."""
    import tfdml

    def pipeline(state=None):
        options = {"label": "y", "seed": 1, "state": state}
        return tfdml.data.read_tfrecords(directory, reading.BATCH, **options)

    whole = pipeline()
    states = {"cold": None, "resumed": whole.state_at(3, whole.steps_per_epoch // 2)}
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(rounds + 1):
        for name, state in states.items():
            # As in `timeit`: a collection of all of TensorFlow's objects takes 0.4 s at any time.
            gc.collect()
            gc.disable()
            begin = time.perf_counter()
            next(iter(pipeline(state)))
            seconds[name].append(time.perf_counter() - begin)
            gc.enable()
    cold, resumed = (statistics.median(found[1:]) for found in seconds.values())
    return (
        f"First batch: {cold:.2f} s cold, {resumed:.2f} s resumed in mid-epoch "
        f"({resumed / cold:.2f}); the state is {len(json.dumps(states['resumed']))} bytes."
    )


def time_reading(directory: str, count: int, rounds: int) -> list[str]:
    """Returns the lines of the report on reading speed."""
    from tfdml.data import write_tfrecords
    from tfdml.data.write import tfds_metadata

    x, y = reading.samples(count)
    data = os.path.join(directory, "data")
    rows = ({"id": i, "x": x[i], "y": int(y[i])} for i in range(count))
    tfds_metadata.write(write_tfrecords(rows, data, shards=reading.SHARDS))
    rates = in_turn(reading.peers(directory, data, x, y), rounds)
    return [*rows_of(f"Reading {count} records", rates), "", first_batch(data, 4 * rounds)]


def time_writing(directory: str, count: int, rounds: int) -> list[str]:
    """Returns the lines of the report on converting rows."""
    # More rows for us, so that starting our processes does not dominate; the others would take
    # minutes for as many.
    path = writing.table(os.path.join(directory, "a.csv"), 5 * count)
    short = writing.table(os.path.join(directory, "short.csv"), count // 4)
    out = os.path.join(directory, "out")
    peers = {
        "convert, 2 processes": writing.ours(path, out, 2),
        "convert, 1 process": writing.ours(path, out, 1),
        f"convert, 1 process, {count // 4} rows": writing.ours(short, out, 1),
        "TFRecordWriter loop": writing.by_loop(short, os.path.join(directory, "plain")),
        "tfds": writing.by_tfds(short, os.path.join(directory, "tfds")),
    }
    return rows_of(
        f"Converting a CSV of {5 * count} rows (peers: {count // 4})", in_turn(peers, rounds)
    )


def time_images(directory: str, count: int, rounds: int) -> list[str]:
    """Returns the lines of the report on converting images."""
    folder = writing.pictures(os.path.join(directory, "in"), count)
    out = os.path.join(directory, "out")
    resized = {"resize": (224, 224), "format": "jpeg"}
    lines = []
    decoders = {"the decoder": "whole", "the decoder, to an eighth": "eighth"}
    for title, options, hows in (
        ("kept as they are", {}, decoders),
        ("resized to 224 x 224", resized, {"the decoder and the encoder": "resized"}),
    ):
        peers = {"convert, 2 processes": writing.ours(folder, out, 2, **options)}
        for name, how in hows.items():
            peers[f"{name}, 2 processes"] = writing.by_decoder(folder, 2, how)
        lines += rows_of(f"{count} JPEGs of 320 x 320, {title}", in_turn(peers, rounds))
    return lines


def main(
    what: Annotated[str, typer.Option(help="reading, writing or images.")] = "reading",
    count: Annotated[int, typer.Option(help="Records, rows or images.")] = 200_000,
    rounds: Annotated[int, typer.Option(help="How often each peer runs.")] = 5,
    write: Annotated[Path | None, typer.Option(help="Append the tables to this file.")] = None,
):
    """Times one kind of work, and prints its tables."""
    kinds = {"reading": time_reading, "writing": time_writing, "images": time_images}
    before = conditions(PACKAGES, load=True)
    with tempfile.TemporaryDirectory(prefix="tfdml-bench-") as directory:
        lines = kinds[what](directory, count, rounds)
    lines = [f"`--what {what} --count {count} --rounds {rounds}`: {before}; medians.", *lines]
    text = "\n".join(lines) + "\n"
    print(text)
    if write is not None:
        with write.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    start(__doc__, main)
