"""Converters of the same rows and images, timed by `tools.bench.data`.

Each function returns a callable that converts and returns the number of rows. The time includes
starting processes.
"""

import concurrent.futures
import csv
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tfdml.data.format.images import ImageOptions, prepare

SHARDS = 8
Conversion = Callable[[], int]


def ours(path: str, output: str, processes: int, **images) -> Conversion:
    """Converts by `tfdml records convert`."""
    from tfdml.data.sources.opening import open_source
    from tfdml.data.write.convert import convert
    from tfdml.data.write.plan import ConversionOptions

    def run() -> int:
        source = open_source([path], images=ImageOptions(**images))
        options = ConversionOptions(shards=SHARDS)
        manifest = convert(source, output, options, processes=processes, overwrite=True)
        return manifest.counts["written"]

    return run


def by_loop(path: str, output: str) -> Conversion:
    """Converts by the `TFRecordWriter` loop of tutorials; TensorFlow is imported beforehand."""
    import tensorflow as tf

    def feature(name: str, cell: str) -> tf.train.Feature:
        if name in ("id", "y"):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(cell)]))
        return tf.train.Feature(float_list=tf.train.FloatList(value=[float(cell)]))

    def run() -> int:
        count = 0
        writers = [tf.io.TFRecordWriter(f"{output}-{i}") for i in range(SHARDS)]
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                features = {name: feature(name, cell) for name, cell in row.items()}
                one = tf.train.Example(features=tf.train.Features(feature=features))
                writers[count % SHARDS].write(one.SerializeToString())
                count += 1
        for writer in writers:
            writer.close()
        return count

    return run


def by_tfds(path: str, output: str) -> Conversion:
    """Converts by a builder of TensorFlow Datasets, which also shuffles by the keys' hashes."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()

    class Rows(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            with open(path, newline="") as file:
                names = next(csv.reader(file))
            kinds = {n: np.int64 if n in ("id", "y") else np.float32 for n in names}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(kinds))

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
            with open(path, newline="") as file:
                for i, row in enumerate(csv.DictReader(file)):
                    yield i, {n: int(c) if n in ("id", "y") else float(c) for n, c in row.items()}

    runs = iter(range(1000))

    def run() -> int:
        builder = Rows(data_dir=os.path.join(output, str(next(runs))))
        builder.download_and_prepare()
        return builder.info.splits["train"].num_examples

    return run


def table(path: str, count: int) -> str:
    """Writes a CSV of 6 columns."""
    rng = np.random.default_rng(0)
    columns = [np.arange(count), rng.integers(0, 10, count), *rng.normal(size=(4, count))]
    head = "id,y,x0,x1,x2,x3"
    np.savetxt(
        path, np.column_stack(columns), "%d,%d,%.4f,%.4f,%.4f,%.4f", header=head, comments=""
    )
    return path


def pictures(directory: str, count: int, size: int = 320) -> str:
    """Writes JPEGs of two classes, with edges and noise as photographs have."""
    rng = np.random.default_rng(0)
    for name in "ab":
        os.makedirs(os.path.join(directory, name), exist_ok=True)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
        pixels = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), np.int16)
        pixels = pixels + rng.integers(-12, 13, pixels.shape, np.int16)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(os.path.join(directory, "ab"[i % 2], f"{i:06d}.jpg"), quality=90)
    return directory


def _decoded(job: tuple[list[str], str]) -> int:
    paths, how = job
    for path in paths:
        with open(path, "rb") as file:
            data = file.read()
        if how == "eighth":
            prepare(data, ImageOptions())
            continue
        image = Image.open(io.BytesIO(data))
        image.load()
        if how == "resized":
            image = image.resize((224, 224), Image.Resampling.BICUBIC)
            image.save(io.BytesIO(), "JPEG", quality=95)
    return len(paths)


def by_decoder(directory: str, processes: int, how: str) -> Conversion:
    """Reads and decodes images without writing them: the limit set by the decoder.

    Args:
        directory: Directory of the images.
        processes: Number of processes.
        how: "whole"; "eighth", the size at which a conversion checks images that it keeps; or
            "resized", and encoded again.
    """
    paths = sorted(str(p) for p in Path(directory).rglob("*.jpg"))
    parts = [(paths[i : i + 64], how) for i in range(0, len(paths), 64)]

    def run() -> int:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
            return sum(pool.map(_decoded, parts))

    return run
