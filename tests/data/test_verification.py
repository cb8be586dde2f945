"""Damage is noticed wherever it is, and mended without losing what is sound."""

import shutil
from pathlib import Path

import pytest

from tfdml.data import manifest as manifests
from tfdml.data import write_tfrecords
from tfdml.data.verification import verify


@pytest.fixture
def small(tmp_path):
    rows = ({"a": i, "b": "x" * i} for i in range(6))
    write_tfrecords(rows, str(tmp_path / "set"), shards=1)
    return tmp_path / "set" / "data-train-00000-of-00001.tfrecord"


def test_a_cut_at_every_byte_is_noticed(small):
    data = small.read_bytes()
    assert verify(str(small.parent)).sound
    for length in range(len(data)):
        small.write_bytes(data[:length])
        assert not verify(str(small.parent)).sound, length


def test_a_flip_of_every_byte_is_noticed_and_costs_one_record(small):
    data = small.read_bytes()
    for i in range(len(data)):
        small.write_bytes(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
        report = verify(str(small.parent))
        assert not report.sound
        assert report.records == 5


@pytest.mark.parametrize("compressed", [False, True])
def test_repair_drops_single_records(tmp_path, compressed):
    rows = ({"a": i, "b": "x" * 10} for i in range(300))
    manifest = write_tfrecords(rows, str(tmp_path / "set"), compressed=compressed)
    path = Path(manifest.path_of(manifest.splits["train"][0]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = verify(str(tmp_path / "set"), repair=True)
    assert not report.sound
    assert report.dropped == 1 if not compressed else report.dropped > 0
    assert verify(str(tmp_path / "set")).sound
    repaired = manifests.load(str(tmp_path / "set"))
    assert repaired.shards("train")[0].records == report.records == 300 - report.dropped
    assert repaired.counts["dropped"] == report.dropped


@pytest.mark.parametrize("damage", ["missing", "shortened", "other"])
def test_an_index_is_checked_and_made_anew(small, damage):
    index = small.with_name(small.name + ".index")
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes(index.read_bytes()[:-1] if damage == "shortened" else b"other")
    report = verify(str(small.parent), repair=True)
    assert not report.sound
    assert (report.records, report.dropped) == (6, 0)
    assert verify(str(small.parent)).sound


def test_a_missing_shard_is_noticed(small):
    small.unlink()
    (problem,) = verify(str(small.parent)).problems
    assert "is missing, with its 6 records" in str(problem)


def test_a_shard_of_another_data_set_is_noticed(small, tmp_path):
    rows = ({"a": i + 1, "b": "x" * i} for i in range(6))
    write_tfrecords(rows, str(tmp_path / "other"), shards=1)
    shutil.copy(tmp_path / "other" / small.name, small)
    assert "its digest is another one" in str(verify(str(small.parent)).problems[0])
