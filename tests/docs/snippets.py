"""Setting for the pages' Python blocks: data, models, and the ranks that run them."""

import os
import re
import textwrap
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.harness import rank_job


class Page(NamedTuple):
    """Manner in which a page's blocks run: in turn, in one namespace, on every rank of a job.

    Attributes:
        kind: The job: "horovod", "multi_worker", or "parameter_server".
        size: Its ranks.
        around: For blocks that are a part of something: the beginning of a block, and the text that
            it stands in, with `BLOCK` in its place.
        smaller: Replacements that make a block's data or training small.
    """

    kind: str = "horovod"
    size: int = 2
    around: tuple[tuple[str, str], ...] = ()
    smaller: tuple[tuple[str, str], ...] = ()


IN_A_REPLICA = """
def replica_function():
    one = other = tf.ones((2, 3))
    BLOCK
    return one


assert sum(len(t) for t in strategy.experimental_local_results(strategy.run(replica_function))) == 4
"""
ONCE = ("epochs=10", "epochs=1")
SHORT = ("steps_per_epoch=1000", "steps_per_epoch=3")
PHOTOS = """
if strategy.is_chief:
    for name, seed in (("photos", 0), ("drawings", 1)):
        write_photos(f"data/{name}", seed)
strategy.reduce("SUM", tf.zeros(()), axis=None)
with strategy.scope():
    model = image_model()
    model.compile("adam", "mse")
BLOCK
"""

PAGES = {
    "README.md": Page("multi_worker", smaller=(("sparse_categorical", "binary"),)),
    "docs/start.md": Page("multi_worker"),
    "docs/strategies.md": Page("multi_worker"),
    "docs/checkpoints.md": Page(smaller=(("epochs=10", "epochs=2"),)),
    "docs/compression.md": Page(),
    "docs/custom_training.md": Page(around=(("replica = tf", IN_A_REPLICA),)),
    "docs/data.md": Page(),
    "docs/debugging.md": Page(),
    "docs/elastic.md": Page(),
    "docs/from_horovod.md": Page(),
    "docs/half_precision.md": Page(),
    "docs/large_batches.md": Page(),
    "docs/memory.md": Page(),
    "docs/monitoring.md": Page(),
    "docs/parallelism.md": Page(smaller=(('"GPU:0", "GPU:1"', '"CPU:0", "CPU:1"'),)),
    "docs/parameter_servers.md": Page(
        "parameter_server", smaller=(SHORT, ("epochs=10", "epochs=1"))
    ),
    "docs/recommenders.md": Page(),
    "docs/robust.md": Page(size=3),
    "docs/slow_networks.md": Page(),
    "docs/tfrecords.md": Page(
        around=(
            ("rows = (", "if strategy.is_chief:\n    BLOCK\n"),
            ("with strategy.scope():\n    train", PHOTOS),
        ),
        smaller=(("(224, 224)", "(8, 8)"), (", 256,", ", 4,"), ONCE),
    ),
    "docs/tuning.md": Page(
        smaller=(("(x, y), strategy)", "(x, y), strategy, start=64, limit=64)"),)
    ),
    "docs/troubleshooting/saving.md": Page(),
    "docs/troubleshooting/speed.md": Page(smaller=(("batch_size=64", "batch_size=16"),)),
}


def run(page: str, blocks: list[str], directory: str) -> int:
    """Runs a page's blocks on a rank, in a directory that all ranks share.

    Returns:
        The number of blocks that ran.
    """
    settings = PAGES[page]
    before = os.getcwd()
    os.chdir(directory)
    names = _names(settings)
    try:
        for number, block in enumerate(blocks):
            exec(compile(_ready(block, settings), f"{page}, block {number}", "exec"), names)
    finally:
        os.chdir(before)
        keras.mixed_precision.set_global_policy("float32")
    return len(blocks)


def _ready(block: str, settings: Page) -> str:
    for before, after in settings.smaller:
        block = block.replace(before, after)
    for beginning, text in settings.around:
        if block.startswith(beginning):
            place, indent = re.search(r"^( *)BLOCK$", text, re.MULTILINE).group(0, 1)
            block = text.replace(place, textwrap.indent(block, indent))
    return block


def _names(settings: Page) -> dict[str, object]:
    """Returns what a page takes for granted: data, a model in a strategy's scope, modules."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(128, 8)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    names = {"keras": keras, "np": np, "tf": tf, "tfdml": tfdml, "ops": keras.ops}
    names |= {"x": x, "y": y, "x_val": x, "y_val": y, "BATCH": 64}
    names |= {"build": build_model, "build_model": build_model, "write_photos": write_photos}
    names["image_model"] = image_model
    names["dataset"] = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
    if settings.kind == "parameter_server":
        names["dataset"] = names["dataset"].repeat()
        return names
    strategy = names["strategy"] = rank_job.strategy()
    with strategy.scope():
        model = names["model"] = build_model()
        model.compile("adam", "mse")
    with tfdml.alone():
        baseline = names["baseline"] = build_model()
        baseline.compile("adam", "mse")
    return names


def build_model() -> keras.Model:
    """Returns a model of the data that gives a number from 0 to 1."""
    hidden = keras.layers.Dense(4, activation="relu")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1, "sigmoid")])


def image_model() -> keras.Model:
    """Returns a model of the images that `write_photos` writes."""
    return keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1, "sigmoid")]
    )


def write_photos(directory: str, seed: int) -> None:
    """Writes small images of two classes as TFRecords."""
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 10, 10, 3), np.uint8)
    records = (
        {"image": tf.io.encode_jpeg(image).numpy(), "label": i % 2}
        for i, image in enumerate(pixels)
    )
    schema = {"image": "image", "label": "int64"}
    tfdml.data.write_tfrecords(records, directory, split="train", shards=1, schema=schema)
