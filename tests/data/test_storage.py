"""Checks storage other than disks: inputs, outputs, repairs and reading through fsspec."""

import gzip
import hashlib
import io
import os
import struct
import sys

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry
from PIL import Image

from tfdml.data import read_tfrecords, write_tfrecords
from tfdml.data.check.verification import verify
from tfdml.data.format import index, storage
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions

ROWS = 60


@pytest.fixture
def store(tmp_path, monkeypatch) -> str:
    """Returns a directory in an in-memory store."""
    # A conversion then stores its progress notes in the user's cache.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = f"memory://{tmp_path.name}"
    yield root
    fs, path = fsspec.core.url_to_fs(root)
    if fs.exists(path):
        fs.rm(path, recursive=True)


def _bytes(save, *arguments) -> bytes:
    data = io.BytesIO()
    save(data, *arguments)
    return data.getvalue()


def _hdf5() -> bytes:
    data = io.BytesIO()
    with h5py.File(data, "w") as file:
        file["id"] = np.arange(ROWS)
    return data.getvalue()


FILES = {
    "a.csv": "id,x\n" + "".join(f"{i},{i / 2}\n" for i in range(ROWS)),
    "a.jsonl": "".join(f'{{"id": {i}}}\n' for i in range(ROWS)),
    "a.parquet": _bytes(lambda f: pq.write_table(pa.table({"id": range(ROWS)}), f)),
    "id.npy": _bytes(np.save, np.arange(ROWS)),
    "a.npz": _bytes(lambda f: np.savez(f, id=np.arange(ROWS))),
    "a.h5": _hdf5(),
    "id=a.gz": gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", ROWS) + bytes(range(ROWS))),
}


@pytest.mark.parametrize("name", FILES)
def test_inputs_and_outputs(store, name):
    data = FILES[name]
    feature, _, file = name.rpartition("=")
    path = f"{store}/in/{file}"
    storage.write_bytes(path, data if isinstance(data, bytes) else data.encode())
    inputs = [f"{feature}={path}" if feature else path]
    convert(open_source(inputs), f"{store}/out", ConversionOptions(shards=2))
    assert verify(f"{store}/out").records == ROWS
    again = open_source([f"{store}/out"])
    found = [int(row.values["id"]) for c in again.chunks() for row in again.rows(c.key)]
    assert found == list(range(ROWS))


def test_image_folder(store):
    for i in range(4):
        picture = _bytes(lambda f, i=i: Image.new("RGB", (4, 4), (i, 0, 0)).save(f, "PNG"))
        storage.write_bytes(f"{store}/in/class{i % 2}/{i}.png", picture)
    source = open_source([f"{store}/in"])
    manifest = convert(source, f"{store}/out", ConversionOptions())
    assert manifest.schema["label"].classes == ("class0", "class1")
    (x, y), *_ = read_tfrecords(f"{store}/out", 4, label="label", features=["image"])
    assert x[:, 0, 0, 0].numpy().tolist() == [0, 2, 1, 3]
    assert y.numpy().tolist() == [0, 0, 1, 1]


def test_pipeline_damage_and_repair(store):
    manifest = write_tfrecords(({"id": i} for i in range(ROWS)), store, shards=2)
    batches = list(read_tfrecords(store, 16))
    assert sorted(np.concatenate(batches)) == list(range(ROWS))
    path = manifest.path_of(manifest.splits["train"][1])
    data = bytearray(storage.read_bytes(path))
    data[-6] ^= 1
    storage.write_bytes(path, bytes(data))
    pipeline = read_tfrecords(store, 16, on_corrupt="skip")
    with pytest.warns(UserWarning, match="its checksum is wrong"):
        weights = np.concatenate([w for _, _, w in pipeline])
    assert weights.sum() == ROWS - 1
    assert verify(store, repair=True).dropped == 1
    assert verify(store).records == ROWS - 1


def test_interrupted_conversion_resumes(store, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text(FILES["a.csv"])
    source = open_source([str(tmp_path / "a.csv")])
    with monkeypatch.context() as patched:
        patched.setattr("tfdml.data.write.checks.check_unchanged", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(source, f"{store}/out", ConversionOptions(shards=3))
    with pytest.raises(ValueError, match="must not have an interrupted conversion"):
        convert(source, f"{store}/out", ConversionOptions(shards=3))
    written = []
    monkeypatch.setattr("tfdml.data.write.tasks.write_shard", lambda *a: written.append(a))
    convert(source, f"{store}/out", ConversionOptions(shards=3), resume=True)
    assert verify(f"{store}/out").records == ROWS
    assert not written
    with pytest.raises(ValueError, match="`output` must be empty"):
        convert(source, f"{store}/out", ConversionOptions(shards=3))


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("path", "package", "plug_in"),
    [
        ("gs://bucket/a.csv", "gcsfs", "Install gcsfs"),
        ("s3://bucket/a.csv", "s3fs", "Install s3fs"),
        ("hdfs://host/a.csv", "pyarrow.fs", "Install Hadoop's libhdfs"),
        ("nowhere://host/a.csv", None, "Install the fsspec plug-in of nowhere://"),
    ],
)
def test_missing_plugin_is_named(monkeypatch, path, package, plug_in):
    if package:
        # Even if this machine has the plugin.
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(_registry, path.split("://")[0], raising=False)
    for use in (lambda: open_source([path]), lambda: read_tfrecords(path, 8)):
        with pytest.raises(ValueError, match=plug_in) as raised:
            use()
        assert path.rsplit("/", 1)[0] in str(raised.value)


def test_local_cache_avoids_reads_from_the_store(store, tmp_path):
    rows = ({"id": i, "x": np.full(500, i, np.float32)} for i in range(600))
    manifest = write_tfrecords(rows, store, shards=3)
    options = {"features": ["id"], "seed": 1, "cache": str(tmp_path / "copies")}
    first = read_tfrecords(store, 32, **options)
    epochs = [np.concatenate(list(first)) for _ in range(2)]
    assert sorted(epochs[0]) == list(range(600))
    copies = [p for p in (tmp_path / "copies").rglob("*") if p.is_file()]
    assert len(copies) == len(first._fetcher.reader.layout.block_records) > 3
    # The cache works without the shards; a damaged or truncated copy is ignored.
    again = read_tfrecords(store, 32, **options)
    shard_contents = [storage.read_bytes(manifest.path_of(s)) for s in manifest.splits["train"]]
    for shard in manifest.splits["train"]:
        storage.remove(manifest.path_of(shard))
    np.testing.assert_array_equal(np.concatenate(list(again)), epochs[0])
    copies[0].write_bytes(copies[0].read_bytes()[:-1])
    copies[1].write_bytes(b"x" + copies[1].read_bytes()[1:])
    without = read_tfrecords(store, 32, **options)
    with pytest.raises(Exception, match="FileNotFoundError"):
        list(without)
    for shard, data in zip(manifest.splits["train"], shard_contents, strict=True):
        storage.write_bytes(manifest.path_of(shard), data)
    np.testing.assert_array_equal(
        np.concatenate(list(read_tfrecords(store, 32, **options))), epochs[0]
    )


def test_memory_cache_reads_each_block_once(tmp_path):
    rows = ({"id": i, "x": np.full(1000, i, np.float32)} for i in range(6000))
    write_tfrecords(rows, str(tmp_path), shards=2)
    counts = {}
    for cache in (None, "memory"):
        pipeline = read_tfrecords(str(tmp_path), 64, features=["id"], window=1024, cache=cache)
        for _ in range(2):
            for _ in pipeline:
                pass
        counts[cache] = pipeline._fetcher.reader.blocks_read
    blocks = len(pipeline._fetcher.reader.layout.block_records)
    assert counts["memory"] == blocks
    assert counts[None] > 1.5 * blocks


def test_full_disk_stops_caching_but_not_reading(dataset, tmp_path):
    (tmp_path / "copies").mkdir()
    manifest = dataset(shards=2)
    # A file where a directory is needed.
    for shard in manifest.splits["train"]:
        path = manifest.path_of(shard)
        folder = hashlib.sha256(path.encode()).hexdigest()[:16]
        (tmp_path / "copies" / folder).write_bytes(b"")
    pipeline = read_tfrecords(
        manifest.directory, 16, features=["id"], cache=str(tmp_path / "copies")
    )
    with pytest.warns(UserWarning, match="Nothing more is cached in cache="):
        assert sorted(np.concatenate(list(pipeline))) == list(range(100))


def test_local_files_are_not_copied(tmp_path):
    path = os.path.join(tmp_path, "a" + index.SUFFIX)
    assert storage.local_copy(path) == path
