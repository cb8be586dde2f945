"""Checks import and export of data sets of other libraries, on real ones prepared here."""

import numpy as np
import pytest

from tfdml.data import read_tfrecords
from tfdml.data.format.images import ImageOptions
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions


def test_tfds_opens_what_is_written(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "image.npy", np.arange(20 * 16).astype(np.uint8).reshape(20, 4, 4))
    np.save(tmp_path / "in" / "label.npy", np.arange(20) % 3)
    source = open_source([str(p) for p in sorted((tmp_path / "in").iterdir())])
    options = ConversionOptions(name="ours", shards=2, splits=(("train", 0.7), ("test", 0.3)))
    manifest = convert(source, str(tmp_path / "out"), options)
    builder = tfds.builder_from_directory(str(tmp_path / "out"))
    rows = []
    for split, shards in manifest.splits.items():
        assert builder.info.splits[split].num_examples == sum(s.records for s in shards)
        rows += list(tfds.as_numpy(builder.as_dataset(split=split)))
    found = sorted((row["image"].tobytes(), int(row["label"])) for row in rows)
    images = np.load(tmp_path / "in" / "image.npy")
    assert found == sorted((image.tobytes(), i % 3) for i, image in enumerate(images))


def test_tfds_data_set_round_trips(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    images = np.random.default_rng(0).integers(0, 256, (12, 5, 6, 3), np.uint8)
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=["a", "b", "c"]),
            "words": tfds.features.Sequence(np.int64),
        }
    )
    rows = [{"image": im, "label": i % 3, "words": list(range(i))} for i, im in enumerate(images)]
    builder = tfds.dataset_builders.store_as_tfds_dataset(
        name="mine",
        version="1.0.0",
        features=features,
        split_datasets={"train": list(enumerate(rows))},
        data_dir=tmp_path / "tfds",
    )
    theirs = list(tfds.as_numpy(builder.as_dataset(split="train")))
    source = open_source([str(builder.data_dir)], images=ImageOptions())
    manifest = convert(source, str(tmp_path / "out"), ConversionOptions(name="mine"))
    assert manifest.schema["label"].classes == ("a", "b", "c")
    (batch,) = read_tfrecords(str(tmp_path / "out"), 12, shuffle=False)
    np.testing.assert_array_equal(batch["image"], [row["image"] for row in theirs])
    np.testing.assert_array_equal(batch["label"], [row["label"] for row in theirs])
    assert batch["words"].to_list() == [row["words"].tolist() for row in theirs]


def test_a_hugging_face_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        tokens=datasets.Sequence(datasets.Value("int64")),
    )
    rows = {
        "text": [f"t{i}" for i in range(10)],
        "label": [i % 2 for i in range(10)],
        "tokens": [list(range(i)) for i in range(10)],
    }
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "hf"))
    manifest = convert(
        open_source([str(tmp_path / "hf")]), str(tmp_path / "out"), ConversionOptions(shards=2)
    )
    assert manifest.schema["label"].classes == ("no", "yes")
    (batch,) = read_tfrecords(str(tmp_path / "out"), 10, shuffle=False)
    assert batch["text"].numpy().tolist() == [t.encode() for t in rows["text"]]
    assert batch["label"].numpy().tolist() == rows["label"]
    assert batch["tokens"].to_list() == rows["tokens"]
