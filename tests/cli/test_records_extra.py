"""Checks `tfdml records` and `tfdml.data` without the packages of the extras."""

import json

import numpy as np
import pytest

from tests.harness.command import run_python
from tfdml.data.format.manifest import load
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions

# Name prefixes of the packages installed by the extras `records` and `hubs`.
EXTRAS = ("h5py", "pil", "pyarrow", "datasets", "tensorflow_datasets")
ROWS = 50


@pytest.fixture(scope="module")
def bare_python(environment_without) -> str:
    return environment_without(*EXTRAS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Directory with an input of each kind that needs a package, and some that need none."""
    home = tmp_path_factory.mktemp("inputs")
    (home / "a.csv").write_text("id,x,text\n" + "".join(f"{i},{i / 3},t{i}\n" for i in range(ROWS)))
    np.savez(home / "a.npz", id=np.arange(ROWS), x=np.linspace(0, 1, 3 * ROWS).reshape(ROWS, 3))
    (home / "a.parquet").write_bytes(b"PAR1")
    (home / "a.h5").write_bytes(b"\x89HDF")
    (home / "paths.csv").write_text("file\nphotos/cat/0.png\n")
    for path, names in {
        "photos/cat": ["0.png"],
        "tfds": ["dataset_info.json", "features.json"],
        "saved": ["state.json"],
    }.items():
        (home / path).mkdir(parents=True)
        for name in names:
            (home / path / name).write_text("{}")
    return home


@pytest.mark.parametrize("name", ["a.csv", "a.npz"])
def test_inputs_that_need_no_package(name, bare_python, inputs, tmp_path):
    """Records written without the packages are byte-identical to those written with them."""
    where = [str(inputs / name)]
    done = run_python(
        *("-m", "tfdml.cli.main", "records", "convert", *where, "-o", str(tmp_path / "without")),
        python=bare_python,
    )
    assert done.returncode == 0, done.stderr
    convert(open_source(where), str(tmp_path / "with"), ConversionOptions())
    shards = [load(str(tmp_path / kind)).splits["train"] for kind in ("without", "with")]
    assert shards[0] == shards[1]
    assert sum(shard.records for shard in shards[0]) == ROWS
    for command in ("verify", "inspect"):
        done = run_python(
            *("-m", "tfdml.cli.main", "records", command, str(tmp_path / "without")),
            python=bare_python,
        )
        assert done.returncode == 0, done.stderr


# TensorFlow decodes the images when records are read.
READING = """
import sys, tensorflow as tf, tfdml
from tfdml.data import Feature, Schema
picture = tf.io.encode_png(tf.fill((4, 4, 3), tf.constant(200, tf.uint8))).numpy()
rows = ({"id": i, "image": picture} for i in range(6))
schema = Schema(id=Feature("int64"), image=Feature("image"))
tfdml.data.write_tfrecords(rows, sys.argv[1], schema=schema)
batches = list(tfdml.data.read_tfrecords(sys.argv[1], 3, image_size=(2, 2), shuffle=False))
assert [b["id"].numpy().tolist() for b in batches] == [[0, 1, 2], [3, 4, 5]]
assert batches[0]["image"].shape == (3, 2, 2, 3)
assert tfdml.data.verify(sys.argv[1]).sound
"""


def test_records_are_written_and_read(bare_python, tmp_path):
    done = run_python("-c", READING, str(tmp_path / "set"), python=bare_python)
    assert done.returncode == 0, done.stderr


OPENING = """
import json, sys
from tfdml.data.optional import MissingPackageError
from tfdml.data.sources.opening import open_source
errors = []
for path, options in json.loads(sys.argv[1]):
    try:
        open_source([path], **options)
    except MissingPackageError as error:
        errors.append(str(error))
print(json.dumps(errors))
"""
NEEDS = [
    ("a.parquet", {}, "Reading Parquet", "pyarrow", "records"),
    ("a.h5", {}, "Reading HDF5", "h5py", "records"),
    ("photos", {}, "Reading images", "pillow", "records"),
    ("paths.csv", {"image_column": "file"}, "Reading images", "pillow", "records"),
    ("tfds", {}, "Reading a data set of TensorFlow Datasets", "tensorflow-datasets", "hubs"),
    ("saved", {}, "Reading a data set of Hugging Face", "datasets", "hubs"),
]


def test_each_message_names_the_package_and_the_extra(bare_python, inputs):
    opened = json.dumps([(str(inputs / name), options) for name, options, *_ in NEEDS])
    done = run_python("-c", OPENING, opened, python=bare_python)
    assert done.returncode == 0, done.stderr
    for message, (_, _, purpose, package, extra) in zip(
        json.loads(done.stdout), NEEDS, strict=True
    ):
        assert message.startswith(
            f"{purpose} needs the package {package}. Received: No module named "
        )
        assert message.endswith(f" Install it: pip install 'tfdml[{extra}]'.")


def test_the_command_shows_the_message_alone(bare_python, inputs, tmp_path):
    done = run_python(
        *("-m", "tfdml.cli.main", "records", "convert", str(inputs / "photos")),
        *("-o", str(tmp_path / "out")),
        python=bare_python,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "tfdml records convert: Reading images needs the package pillow. Received: No module named "
        "'PIL'. Install it: pip install 'tfdml[records]'.\n"
    )
    convert(open_source([str(inputs / "a.npz")]), str(tmp_path / "set"), ConversionOptions())
    done = run_python(
        *("-m", "tfdml.cli.main", "records", "inspect", str(tmp_path / "set")),
        *("--sheet", str(tmp_path / "sheet.png")),
        python=bare_python,
    )
    assert done.returncode == 1
    assert "Drawing a sheet of images needs the package pillow" in done.stderr
