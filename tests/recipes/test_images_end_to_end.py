"""Checks real images end to end: converted, verified, and trained on by two ranks."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tfdml
from tests.harness import rank_job
from tests.harness.command import run_python
from tfdml.data.check.verification import verify
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions

FILES = Path("/usr/share/datasets/fashion-mnist")


def train(directory: str) -> tuple[float, float]:
    with rank_job.strategy().scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((28, 28)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        data = tfdml.data.read_tfrecords(directory, 256, "train", label="label", seed=1)
        validation = tfdml.data.read_tfrecords(
            directory, 256, "validation", label="label", shuffle=False
        )
    history = model.fit(data, epochs=1, validation_data=validation, verbose=0).history
    return history["loss"][0], history["val_accuracy"][0]


@pytest.mark.slow
@pytest.mark.skipif(not FILES.exists(), reason="needs Debian's dataset-fashion-mnist")
def test_convert_verify_and_train_on_two_ranks(ranks, tmp_path):
    output = str(tmp_path / "out")
    inputs = [
        f"{name}={FILES}/train-{name}s-idx{n}-ubyte.gz" for name, n in (("image", 3), ("label", 1))
    ]
    done = run_python(
        *("tools/convert_tfrecord.py", *inputs, "--kind", "idx", "-o", output, "--shards", "3"),
        *("--split", "train=0.9,validation=0.1", "--shuffle", "1", "--processes", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert "60000 in = 60000 written + 0 rejected" in done.stdout
    report = verify(output)
    assert report.sound
    assert report.records == 60_000
    (one,), two = (ranks(size).run(train, output, timeout=240.0) for size in (1, 2))
    for loss, accuracy in two:
        assert loss == pytest.approx(one[0], rel=1e-3)
        assert accuracy == pytest.approx(one[1], abs=5e-3)
    assert one[1] > 0.8


def test_labels_stay_with_their_images(tmp_path):
    np.save(tmp_path / "image.npy", np.arange(100, dtype=np.uint8).reshape(100, 1, 1))
    np.save(tmp_path / "label.npy", np.arange(100))
    source = open_source([str(tmp_path / "image.npy"), str(tmp_path / "label.npy")])
    convert(source, str(tmp_path / "out"), ConversionOptions(shuffle_seed=1, shards=3))
    for x, y in tfdml.data.read_tfrecords(str(tmp_path / "out"), 16, label="label"):
        np.testing.assert_array_equal(x[:, 0, 0], y)
