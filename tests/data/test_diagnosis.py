"""Checks that the diagnosis names the bottleneck of reading: the stage that was made slow."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.harness.command import run_python
from tfdml.data import write_tfrecords
from tfdml.data.check import diagnosis
from tfdml.data.check.diagnosis import diagnose
from tfdml.data.format import storage


def picture(size: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


@pytest.fixture
def pictures(tmp_path) -> str:
    rows = ({"image": picture(64), "label": i % 3} for i in range(300))
    schema = {"image": {"kind": "image"}, "label": "int64"}
    write_tfrecords(rows, str(tmp_path), schema=schema, shards=2)
    return str(tmp_path)


def test_decoding_is_named_as_the_bottleneck_of_images(pictures):
    found = diagnose(pictures, batch_size=16, seconds=0.3)
    assert [stage.name for stage in found.stages] == [
        "read from disk",
        "pick records in the epoch's order",
        "parse",
        "decode images",
    ]
    assert found.slowest.name == "decode images"
    assert "--resize" in found.slowest.fix
    assert all(stage.rate > 0 for stage in found.stages)
    assert 0 < found.pipeline < np.inf


def test_a_slow_disk_is_named(pictures, monkeypatch):
    import time

    fast = storage.read_range

    def slow(*arguments):
        time.sleep(0.2)
        return fast(*arguments)

    monkeypatch.setattr(diagnosis.storage, "read_range", slow)
    found = diagnose(pictures, batch_size=16, seconds=0.3)
    assert found.stages[0].rate < 10 * found.stages[2].rate
    assert found.slowest.name in ("read from disk", "pick records in the epoch's order")


def test_advice_on_files(dataset):
    manifest = dataset(count=400, shards=4)
    found = diagnose(manifest.directory, batch_size=32, seconds=0.1)
    assert any("larger ones (100 to 200 MB)" in line for line in found.advice)
    assert "decode images" not in [stage.name for stage in found.stages]


def test_advice_on_large_and_uneven_shards(tmp_path, monkeypatch):
    import dataclasses

    from tfdml.data.read.dataset import RecordDataset

    rows = ({"x": "y" * (5000 if i % 3 == 0 else 5)} for i in range(60))
    write_tfrecords(rows, str(tmp_path), shards=3)
    dataset = RecordDataset(str(tmp_path))
    monkeypatch.setattr(diagnosis, "SMALL_SHARD", 0)
    (line,) = diagnosis._advice(dataset)
    assert "Shards are uneven" in line
    monkeypatch.setattr(diagnosis, "LARGE_SHARD", 50_000)
    assert "shards of 100 to 200 MB mix better" in diagnosis._advice(dataset)[0]
    even = [dataclasses.replace(s, bytes=1000) for s in dataset.shards]
    dataset.shards = even
    assert diagnosis._advice(dataset) == []


def test_command(pictures):
    done = run_python("-m", "tfdml.cli.main", "doctor", "--data", pictures, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "The slowest stage: decode images" in done.stdout
    assert "the whole pipeline" in done.stdout


def test_no_data(tmp_path):
    done = run_python("-m", "tfdml.cli.main", "doctor", "--data", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
