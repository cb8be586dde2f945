"""Checks that malformed arrays and records are reported with file, row and reason."""

import gzip
import struct

import h5py
import numpy as np
import pytest

from tests.data.opened import rows
from tfdml.data import write_tfrecords
from tfdml.data.format import example
from tfdml.data.format.framing import frame
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions


def test_numpy(tmp_path):
    values = np.arange(6, dtype=">i4").reshape(3, 2)
    np.save(tmp_path / "a.npy", values)
    manifest = convert(
        open_source([str(tmp_path / "a.npy")]), str(tmp_path / "out"), ConversionOptions()
    )
    np.testing.assert_array_equal([row["a"] for row in rows(tmp_path / "out")], values)
    assert manifest.schema["a"].dtype == "int32"
    np.savez(tmp_path / "b.npz", x=np.ones((2, 3)), y=np.array([1, 2]))
    assert [row["y"] for row in rows(tmp_path / "b.npz")] == [1, 2]


def test_wrong_numpy_files_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="are pickled: reading them could run code"):
        rows(path)
    np.save(path, np.ones(5))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="An input must be undamaged"):
        rows(path)
    np.save(path, np.array([1.0, np.inf]))
    with pytest.raises(ValueError, match="row 1: 'a' must be finite"):
        rows(path)
    np.savez(tmp_path / "b.npz", x=np.ones(2), y=np.ones(3))
    with pytest.raises(ValueError, match="All arrays must have the same number of rows"):
        rows(tmp_path / "b.npz")


def test_hdf5(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/x"] = np.arange(4, dtype=np.float32).reshape(2, 2)
        file["y"] = [5, 6]
    assert [row["y"] for row in rows(tmp_path / "a.h5")] == [5, 6]
    assert rows(tmp_path / "a.h5")[1]["g.x"].tolist() == [2, 3]


def test_tfrecords_are_resharded(tmp_path):
    write_tfrecords(({"a": i, "b": "x"} for i in range(50)), str(tmp_path / "one"), shards=1)
    manifest = convert(
        open_source([str(tmp_path / "one")]), str(tmp_path / "five"), ConversionOptions(shards=5)
    )
    assert [shard.records for shard in manifest.splits["train"]] == [10] * 5
    # Files of other tools have no index.
    (tmp_path / "plain.tfrecord").write_bytes(
        b"".join(
            frame(example.encoder([("a", "a", example.one_int64)])({"a": i})) for i in range(9)
        )
    )
    assert [int(row["a"]) for row in rows(tmp_path / "plain.tfrecord")] == list(range(9))
    (tmp_path / "cut.tfrecord").write_bytes((tmp_path / "plain.tfrecord").read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut.tfrecord, record 8, offset .* the file ends"):
        rows(tmp_path / "cut.tfrecord")


@pytest.mark.parametrize("kind", ["array", "jsonl"])
def test_a_record_of_2_gib_is_refused(tmp_path, monkeypatch, kind):
    (tmp_path / "a.jsonl").write_text('{"x": "y"}\n{"x": "%s"}\n' % ("y" * 3000))
    np.save(tmp_path / "a.npy", np.zeros((2, 1000)))
    path = {"array": "a.npy", "jsonl": "a.jsonl"}[kind]
    # As if protocol buffers had this size limit.
    monkeypatch.setattr("tfdml.data.format.framing.LARGEST_RECORD", 2000)
    row = {"array": "row 0", "jsonl": "row 2"}[kind]
    with pytest.raises(ValueError, match=f"{path}, {row}: A record must have fewer than 2 GiB"):
        convert(open_source([str(tmp_path / path)]), str(tmp_path / "out"), ConversionOptions())
    assert not list((tmp_path / "out").glob("*.manifest.json"))


def test_largest_record_is_the_limit_of_protocol_buffers():
    from tfdml.data.format import framing

    assert framing.LARGEST_RECORD == 2**31 - 1


def idx(*shape: int, data: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">I", n) for n in shape) + data


BAD_ARRAYS = {
    "idx without all values": ("a", idx(3, 2, data=b"12345"), "must hold 6 bytes of values"),
    "idx with more": ("a", idx(2, data=b"123"), "must hold 2 bytes of values"),
    "idx within its header": ("a", idx(3, 2, data=b"")[:9], "ends within its header"),
    "idx of no kind": ("a", b"\0\0\7\1" + bytes(8), "does not begin with an IDX header"),
    "gzip that is cut": ("a.gz", gzip.compress(idx(2, data=b"12"))[:-3], "is damaged"),
    "hdf5 that is cut": ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "An input must be undamaged"),
    "npz that is cut": ("a.npz", b"PK\3\4" + bytes(40), "An input must be undamaged"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_wrong_arrays_are_refused(tmp_path, case):
    name, data, message = BAD_ARRAYS[case]
    (tmp_path / name).write_bytes(data)
    kind = "idx" if name in ("a", "a.gz") else None
    with pytest.raises(ValueError, match=message):
        open_source([str(tmp_path / name)], kind=kind)


def test_arrays_without_rows_are_refused(tmp_path):
    for values in (np.zeros((0, 2)), np.array(3.0)):
        np.save(tmp_path / "a.npy", values)
        with pytest.raises(ValueError, match="must have rows"):
            open_source([str(tmp_path / "a.npy")])
