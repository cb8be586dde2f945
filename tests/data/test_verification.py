"""Checks that damage is detected anywhere, and repaired without loss of valid records."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tfdml.data import write_tfrecords
from tfdml.data.check.verification import verify
from tfdml.data.format import index
from tfdml.data.format import manifest as manifests
from tfdml.data.format.framing import FRAME


@pytest.fixture
def small(tmp_path):
    rows = ({"a": i, "b": "x" * i} for i in range(6))
    write_tfrecords(rows, str(tmp_path / "set"), shards=1)
    return tmp_path / "set" / "data-train-00000-of-00001.tfrecord"


def test_truncation_at_every_byte_is_detected(small):
    data = small.read_bytes()
    assert verify(str(small.parent)).sound
    for length in range(len(data)):
        small.write_bytes(data[:length])
        assert not verify(str(small.parent)).sound, length


def test_flip_of_every_byte_is_detected_and_costs_one_record(small):
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
def test_index_is_checked_and_rebuilt(small, damage):
    index = small.with_name(small.name + ".index")
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes(index.read_bytes()[:-1] if damage == "shortened" else b"other")
    report = verify(str(small.parent), repair=True)
    assert not report.sound
    assert (report.records, report.dropped) == (6, 0)
    assert verify(str(small.parent)).sound


def test_missing_shard_is_detected(small):
    small.unlink()
    (problem,) = verify(str(small.parent)).problems
    assert "is missing, with its 6 records" in str(problem)


def test_shard_of_another_data_set_is_detected(small, tmp_path):
    rows = ({"a": i + 1, "b": "x" * i} for i in range(6))
    write_tfrecords(rows, str(tmp_path / "other"), shards=1)
    shutil.copy(tmp_path / "other" / small.name, small)
    assert "its digest differs from the manifest's" in str(verify(str(small.parent)).problems[0])


def say(shard: Path, **changes) -> None:
    """Changes a shard's entry in the manifest."""
    path = shard.with_name("data.manifest.json")
    description = json.loads(path.read_text())
    description["splits"]["train"][0] |= changes
    path.write_text(json.dumps(description))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Each damage passes all checks except one: without that check, verify would report success.


def another_size(shard: Path) -> None:
    say(shard, bytes=shard.stat().st_size + 1)


def another_digest(shard: Path) -> None:
    # A valid record with the length of the one that it replaces.
    other = shard.parent.parent / "other"
    rows = ({"a": i + (i == 3), "b": "x" * i} for i in range(6))
    write_tfrecords(rows, str(other), shards=1)
    for name in (shard.name, shard.name + index.SUFFIX):
        shutil.copy(other / name, shard.parent / name)
    say(shard, index_sha256=digest(shard.with_name(shard.name + index.SUFFIX)))


def another_count(shard: Path) -> None:
    say(shard, records=7)


def a_damaged_record(shard: Path) -> None:
    # Damaged before its digest was computed.
    data = bytearray(shard.read_bytes())
    data[-6] ^= 1
    shard.write_bytes(data)
    say(shard, sha256=digest(shard))


def cut_between_records(shard: Path) -> None:
    # With a matching index, digests and size: only the count reveals it.
    lengths = index.read(str(shard)).lengths
    shard.write_bytes(shard.read_bytes()[: -(int(lengths[-1]) + FRAME)])
    sidecar = shard.with_name(shard.name + index.SUFFIX)
    sidecar.write_bytes(index.build(str(shard)).to_bytes())
    size = shard.stat().st_size
    say(shard, bytes=size, sha256=digest(shard), index_sha256=digest(sidecar))


def another_index(shard: Path) -> None:
    # A whole index of the same records in other blocks.
    sidecar = shard.with_name(shard.name + index.SUFFIX)
    found = index.read(str(shard))
    sizes = found.lengths.astype("u8") + FRAME
    ones = sizes // sizes
    crcs = [index.crc32c(part) for part in cut(shard.read_bytes(), sizes)]
    other = index.ShardIndex(found.lengths, ones, sizes, sizes, ones.astype("u4") * 0 + crcs)
    sidecar.write_bytes(other.to_bytes())


def cut(data: bytes, sizes) -> list[bytes]:
    ends = sizes.cumsum().tolist()
    return [data[e - int(s) : e] for s, e in zip(sizes, ends, strict=True)]


NEEDED = {
    another_size: "bytes instead of",
    another_digest: "its digest differs from the manifest's",
    another_count: "has 6 records instead of 7",
    a_damaged_record: "record 5: its checksum is wrong",
    cut_between_records: "has 5 records instead of 6",
    another_index: "index: its digest differs from the manifest's",
}


@pytest.mark.parametrize("damage", NEEDED, ids=lambda d: d.__name__)
def test_each_check_is_needed(small, damage):
    assert verify(str(small.parent)).sound
    damage(small)
    (problem,) = verify(str(small.parent)).problems
    assert NEEDED[damage] in str(problem)


def test_truncation_between_records_is_detected_without_an_index(small):
    lengths = index.read(str(small)).lengths
    small.write_bytes(small.read_bytes()[: -(int(lengths[-1]) + FRAME)])
    small.with_name(small.name + index.SUFFIX).unlink()
    problems = "\n".join(map(str, verify(str(small.parent)).problems))
    for problem in ("bytes instead of", "digest differs", "is missing", "5 records instead of"):
        assert problem in problems
