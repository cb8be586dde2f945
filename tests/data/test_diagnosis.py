"""Checks that the diagnosis names the bottleneck of reading: the stage that was made slow."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.harness.command import run_python
from tfdml.data import read_tfrecords, write_tfrecords
from tfdml.data.check import diagnosis
from tfdml.data.check.diagnosis import diagnose
from tfdml.data.format import storage


def picture(size: int) -> bytes:
    """Returns a JPEG of few bytes that takes long to decode."""
    data = io.BytesIO()
    Image.radial_gradient("L").resize((size, size)).convert("RGB").save(data, "JPEG")
    return data.getvalue()


@pytest.fixture
def pictures(tmp_path) -> str:
    # So large that decoding takes 15 times as long as any other stage, of so many records.
    image = picture(512)
    rows = ({"image": image, "label": i % 3} for i in range(6000))
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
        "start an epoch",
    ]
    assert found.slowest.name == "decode images"
    assert "--resize" in found.slowest.fix
    assert all(stage.rate > 0 for stage in found.stages)
    assert 0 < found.pipeline < np.inf


def write_images(directory, sizes, count: int = 12) -> str:
    rows = ({"image": picture(sizes[i % len(sizes)]), "label": 0} for i in range(count))
    write_tfrecords(
        rows, str(directory), schema={"image": {"kind": "image"}, "label": "int64"}, shards=1
    )
    return str(directory)


def details(found: diagnosis.Diagnosis) -> dict[str, str]:
    return {stage.name: stage.detail for stage in found.stages}


@pytest.mark.parametrize(
    ("sizes", "image_size", "detail"),
    [
        ((32,), None, "as they are"),
        ((32, 40), None, "resized to 224x224"),
        ((32, 40), (16, 24), "resized to 16x24"),
    ],
)
def test_images_of_unequal_size_are_resized(tmp_path, sizes, image_size, detail):
    path = write_images(tmp_path, sizes)
    found = diagnose(path, batch_size=4, image_size=image_size, seconds=0.05)
    assert details(found)["decode images"].endswith(detail)
    assert found.pipeline > 0


def test_few_records_have_finite_rates_and_the_start_of_an_epoch_is_slowest(tmp_path):
    """A data set of less than a batch is read several times."""
    write_tfrecords(({"x": i} for i in range(5)), str(tmp_path), shards=1)
    found = diagnose(str(tmp_path), batch_size=256, seconds=0.1)
    assert all(0 < stage.rate < np.inf for stage in found.stages)
    assert found.slowest.name == "start an epoch"
    # Five records an epoch are counted, not a whole batch.
    batches = read_tfrecords(str(tmp_path), 256)
    assert [diagnosis._rows(batch) for batch in batches] == [5]


@pytest.mark.slow
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


def doctor(path: str, *options: str):
    return run_python("-m", "tfdml.cli.main", "doctor", "--data", path, *options, COLUMNS="120")


def test_command(pictures):
    done = doctor(pictures, "--image-size", "64x64")
    assert done.returncode == 0, done.stderr
    assert "resized to 64x64" in done.stdout
    assert "The slowest stage: decode images" in done.stdout
    assert "the whole pipeline" in done.stdout


def test_a_wrong_size_is_refused(tmp_path):
    done = doctor(str(tmp_path), "--image-size", "64")
    assert done.returncode == 1
    assert "`image_size` must be HEIGHTxWIDTH, such as 224x224. Received: '64'" in done.stderr


def test_no_data(tmp_path):
    done = run_python("-m", "tfdml.cli.main", "doctor", "--data", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
