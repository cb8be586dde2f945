"""Input that is not as it should be: said with file, row and reason, and nothing is lost."""

import gzip
import io
import os
import struct

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tfdml.data import example, read_tfrecords, write_tfrecords
from tfdml.data.convert import convert
from tfdml.data.framing import frame
from tfdml.data.images import ImageOptions, prepare
from tfdml.data.plan import Options
from tfdml.data.schema import Schema
from tfdml.data.sources.opening import open_source
from tfdml.data.values import encoder


def rows(path, **options) -> list[dict]:
    source = open_source([str(path)], **options)
    encode = encoder(source.schema)
    found = []
    for chunk in source.chunks():
        for row in source.rows(chunk.key):
            if row.values is None:
                raise ValueError(f"{row.where}: {row.reason}")
            try:
                encode(row.values)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from error
            found.append(row.values)
    return found


def encoded(image: Image.Image, form: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))


def bomb() -> bytes:
    """A PNG of a few bytes that claims 60,000 x 60,000 pixels."""
    data = bytearray(encoded(NOISE, "PNG"))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    import zlib

    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(NOISE, "JPEG", exif=exif)


BAD_IMAGES = {
    "empty": (b"", "is an empty file"),
    "cut jpeg": (encoded(NOISE, "JPEG")[:-300], "is damaged"),
    "cut png": (encoded(NOISE, "PNG")[:-300], "is damaged"),
    "text": (b"<html>not found</html>", "is not an image"),
    "bomb": (bomb(), "has too many pixels"),
}
WRONGLY_READ = {
    "cmyk": (encoded(NOISE.convert("CMYK"), "JPEG"), "is in mode CMYK"),
    "16 bits": (
        encoded(Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "PNG"),
        "is in mode I;16",
    ),
    "alpha": (encoded(NOISE.convert("RGBA"), "PNG"), "is transparent"),
    "rotated": (rotated(), "is rotated by its EXIF orientation"),
    "animated": (
        encoded(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)]),
        "is animated, of 2 frames",
    ),
    "webp": (encoded(NOISE, "WEBP"), "is WEBP, which TensorFlow does not decode"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
@pytest.mark.parametrize("fix", [False, True])
def test_damaged_images(name, fix):
    data, message = BAD_IMAGES[name]
    with pytest.raises(ValueError, match=message):
        prepare(data, ImageOptions(fix=fix))


@pytest.mark.parametrize("name", WRONGLY_READ)
def test_images_that_tensorflow_would_read_wrongly(name):
    data, message = WRONGLY_READ[name]
    with pytest.raises(ValueError, match=message):
        prepare(data, ImageOptions())
    fixed = Image.open(io.BytesIO(prepare(data, ImageOptions(fix=True))))
    assert fixed.mode in ("L", "RGB")
    assert getattr(fixed, "n_frames", 1) == 1
    assert fixed.size == {"rotated": (40, 60), "16 bits": (4, 4)}.get(name, (60, 40))
    if name == "16 bits":
        assert fixed.getpixel((0, 0)) == 40_000 // 256


def test_sound_images_keep_their_bytes():
    for form in ("JPEG", "PNG", "BMP", "GIF"):
        data = encoded(NOISE, form)
        assert prepare(data, ImageOptions()) == data
    resized = prepare(encoded(NOISE, "PNG"), ImageOptions((10, 20), "jpeg", 80))
    image = Image.open(io.BytesIO(resized))
    assert (image.format, image.size) == ("JPEG", (20, 10))


def folder(tmp_path) -> str:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "1.png").write_bytes(encoded(NOISE, "PNG"))
    return str(tmp_path / "in")


def test_image_folder_with_odd_names(tmp_path):
    path = folder(tmp_path)
    odd = os.path.join(os.fsencode(path), b"dog", b"a b\n\xff.png")
    with open(odd, "wb") as file:
        file.write(encoded(NOISE, "PNG"))
    manifest = convert(open_source([path]), str(tmp_path / "out"), Options())
    assert manifest.counts["written"] == 3
    assert manifest.schema["label"].classes == ("cat", "dog")
    found = rows(tmp_path / "out")
    assert [int(row["label"]) for row in found] == [0, 1, 1]
    assert b"dog/a b\n\xff.png" in [row["file"] for row in found]


@pytest.mark.parametrize("case", ["empty class", "loop", "beside", "other file", "inside"])
def test_image_folders_that_are_refused(tmp_path, case):
    path = folder(tmp_path)
    inside = os.path.join(path, "cat")
    output = os.path.join(path, "out") if case == "inside" else str(tmp_path / "out")
    message = {
        "empty class": r"\['empty'\] folders without images",
        "loop": "links that lead in a circle",
        "beside": "1.png beside the classes",
        "other file": "notes.txt: is not an image file",
        "inside": "`output` must not be within the input",
    }[case]
    if case == "empty class":
        os.mkdir(os.path.join(path, "empty"))
    elif case == "loop":
        os.symlink(path, os.path.join(inside, "loop"))
    elif case == "beside":
        os.rename(os.path.join(inside, "1.png"), os.path.join(path, "1.png"))
    elif case == "other file":
        with open(os.path.join(inside, "notes.txt"), "w") as file:
            file.write("x")
    with pytest.raises(ValueError, match=message):
        convert(open_source([path], kind="images"), output, Options())


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_tables_of_images(tmp_path, kind):
    folder(tmp_path)
    text = {
        "csv": "path,label\ncat/1.png,b\ndog/1.png,a\n",
        "jsonl": '{"path": "cat/1.png", "label": "b"}\n{"path": "dog/1.png", "label": "a"}\n',
    }[kind]
    path = tmp_path / "in" / f"list.{kind}"
    path.write_text(text)
    found = rows(path, image_column="path", label_column="label")
    assert [row["label"] for row in found] == [1, 0]
    assert found[0]["path"] == encoded(NOISE, "PNG")


GOOD_CSV = {
    "bom": (b"\xef\xbb\xbfa,b\n1,x\n", [{"a": 1, "b": "x"}]),
    "quoted newlines": (b'a,b\n1,"x\ny, ""z"""\n2,w\n', [1, 2]),
    "windows": (b"a,b\r\n1,x\r\n\r\n2,y", [1, 2]),
}


@pytest.mark.parametrize("name", GOOD_CSV)
def test_csv(tmp_path, name):
    data, wanted = GOOD_CSV[name]
    (tmp_path / "a.csv").write_bytes(data)
    found = rows(tmp_path / "a.csv")
    assert found == wanted or [row["a"] for row in found] == wanted
    if name == "quoted newlines":
        assert found[0]["b"] == 'x\ny, "z"'


MANY = b"".join(b"%d,x\n" % i for i in range(2000))
BAD_CSV = {
    "not utf-8": (b"a,b\n1,x\n2,\xff\n", "row 2: must be in UTF-8. Received: byte 0xff"),
    "utf-16": ("a,b\n1,x\n".encode("utf-16"), "must be in UTF-8. Received: .*in UTF-16"),
    "ragged": (b"a,b\n1,x\n2\n", "row 2: must have 2 cells, as the header. Received: 1"),
    "header twice": (b"a,b,a\n1,x,2\n", "must name each column once"),
    "empty": (b"", "which is empty"),
    "only a header": (b"a,b\n", "must have rows"),
    "overflow": (b"a\n9223372036854775808\n", "row 1: 'a' must fit 64 bits"),
    "nan": (b"a\n1.5\nnan\n", "row 2: 'a' must be finite. Received: nan"),
    "float32 overflow": (b"a\n1.5\n1e300\n", "row 2: 'a' must fit float32"),
    "type change": (b"a,b\n" + MANY + b"y,x\n", "row 2001: 'a' must be int64. Received: 'y'"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_csv_that_is_refused(tmp_path, name):
    data, message = BAD_CSV[name]
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / "a.csv")


BAD_JSONL = {
    "missing": ('{"a": 1, "b": 2}\n{"a": 1}', "row 2: columns ..b.. are missing"),
    "more": ('{"a": 1}\n' * 1500 + '{"a": 1, "c": 2}', "columns ..c.. are not in the schema"),
    "null": ('{"a": 1}\n{"a": null}', "row 2: 'a' must be an integer. Received: None"),
    "twice": ('{"a": 1}\n{"a": 1, "a": 2}', "a name is there twice"),
    "cut": ('{"a": 1}\n{"a": ', "row 2: is not JSON"),
    "no object": ('{"a": 1}\n[1]', "row 2: is not JSON: must be an object"),
}


@pytest.mark.parametrize("name", BAD_JSONL)
def test_jsonl_that_is_refused(tmp_path, name):
    text, message = BAD_JSONL[name]
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / "a.jsonl")


def test_parquet_with_nested_columns(tmp_path):
    wanted = [{"s": {"x": 1, "y": [1.5, 2.5]}, "l": [[1], [2, 3]], "t": "a"}]
    pq.write_table(pa.Table.from_pylist(wanted), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [
        {"s.x": 1, "s.y": [1.5, 2.5], "l": [[1], [2, 3]], "t": "a"}
    ]


def test_parquet_that_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1, None], "b": [1, 2]}), path)
    with pytest.raises(
        ValueError, match=r"row 1: columns \['a'\] must have values. Received: null"
    ):
        rows(path)
    pq.write_table(pa.table({"a": pa.array([1], pa.timestamp("s"))}), path)
    with pytest.raises(ValueError, match="Column 'a' must hold numbers"):
        rows(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="An input must be whole"):
        rows(path)


def test_numpy(tmp_path):
    values = np.arange(6, dtype=">i4").reshape(3, 2)
    np.save(tmp_path / "a.npy", values)
    manifest = convert(open_source([str(tmp_path / "a.npy")]), str(tmp_path / "out"), Options())
    np.testing.assert_array_equal([row["a"] for row in rows(tmp_path / "out")], values)
    assert manifest.schema["a"].dtype == "int32"
    np.savez(tmp_path / "b.npz", x=np.ones((2, 3)), y=np.array([1, 2]))
    assert [row["y"] for row in rows(tmp_path / "b.npz")] == [1, 2]


def test_numpy_that_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="are pickled: reading them could run code"):
        rows(path)
    np.save(path, np.ones(5))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="An input must be whole"):
        rows(path)
    np.save(path, np.array([1.0, np.inf]))
    with pytest.raises(ValueError, match="row 1: 'a' must be finite"):
        rows(path)
    np.savez(tmp_path / "b.npz", x=np.ones(2), y=np.ones(3))
    with pytest.raises(ValueError, match="All arrays must have equally many rows"):
        rows(tmp_path / "b.npz")


def test_hdf5(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/x"] = np.arange(4, dtype=np.float32).reshape(2, 2)
        file["y"] = [5, 6]
    assert [row["y"] for row in rows(tmp_path / "a.h5")] == [5, 6]
    assert rows(tmp_path / "a.h5")[1]["g.x"].tolist() == [2, 3]


def test_tfrecords_are_cut_anew(tmp_path):
    write_tfrecords(({"a": i, "b": "x"} for i in range(50)), str(tmp_path / "one"), shards=1)
    manifest = convert(
        open_source([str(tmp_path / "one")]), str(tmp_path / "five"), Options(shards=5)
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
    # As if protocol buffers ended there.
    monkeypatch.setattr("tfdml.data.framing.LARGEST_RECORD", 2000)
    row = {"array": "row 0", "jsonl": "row 2"}[kind]
    with pytest.raises(ValueError, match=f"{path}, {row}: A record must have fewer than 2 GiB"):
        convert(open_source([str(tmp_path / path)]), str(tmp_path / "out"), Options())
    assert not list((tmp_path / "out").glob("*.manifest.json"))


def test_the_largest_record_is_what_protocol_buffers_hold():
    from tfdml.data import framing

    assert framing.LARGEST_RECORD == 2**31 - 1


@pytest.mark.parametrize("crop", ["resize", "random"])
def test_an_image_with_the_ending_of_another_kind_is_read_as_what_it_is(tmp_path, crop):
    """A PNG that is called .jpg: its bytes are kept, and TensorFlow looks at those."""
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "1.jpg").write_bytes(encoded(NOISE, "PNG"))
    convert(open_source([str(tmp_path / "in")]), str(tmp_path / "out"), Options())
    pipeline = read_tfrecords(
        str(tmp_path / "out"), 1, features=["image"], image_size=(40, 60), crop=crop
    )
    (image,) = next(iter(pipeline))
    assert image.shape == (40, 60, 3)
    if crop == "resize":
        np.testing.assert_array_equal(image, np.asarray(NOISE))


def test_a_schema_must_have_the_columns_of_the_header(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    for names in (["a"], ["a", "b", "c"]):
        schema = Schema.from_json(dict.fromkeys(names, "int64"))
        with pytest.raises(ValueError, match="`schema` must have the columns of the header"):
            open_source([str(tmp_path / "a.csv")], schema=schema)
    (tmp_path / "b.csv").write_text("a,c\n1,2\n")
    with pytest.raises(ValueError, match="All files must have one header"):
        open_source([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")])


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "Infinity"])
def test_what_is_not_finite_is_a_value_only_where_that_is_asked_for(tmp_path, value):
    (tmp_path / "a.csv").write_text(f"a\n1.5\n{value}\n")
    source = open_source([str(tmp_path / "a.csv")])
    with pytest.raises(ValueError, match="row 2: 'a' must be finite"):
        convert(source, str(tmp_path / "strict"), Options())
    convert(source, str(tmp_path / "out"), Options(allow_nonfinite=True))
    assert [float(r["a"]) for r in stored(tmp_path / "out")][0] == 1.5
    found = [float(r["a"]) for r in stored(tmp_path / "out")][1]
    assert not np.isfinite(found)


def stored(path) -> list[dict]:
    source = open_source([str(path)])
    return [row.values for chunk in source.chunks() for row in source.rows(chunk.key)]


def test_jsonl_in_utf8_with_and_without_a_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": 1, "b": {"c": "\xc3\xa9"}}\n\n{"a": 2, "b": {"c": ""}}'
    )
    assert rows(tmp_path / "a.jsonl") == [{"a": 1, "b.c": "é"}, {"a": 2, "b.c": ""}]
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n')
    with pytest.raises(ValueError, match="row 2: must be in UTF-8. Received: byte 0xff"):
        rows(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"a": 1.5}\n{"a": NaN}')
    with pytest.raises(ValueError, match="row 2: 'a' must be finite"):
        rows(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": 9223372036854775808}')
    with pytest.raises(ValueError, match="row 2: 'a' must fit 64 bits"):
        rows(tmp_path / "d.jsonl")


def test_parquet_with_types_that_records_cannot_hold(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [[{"x": 1}]]}), path)
    with pytest.raises(ValueError, match="Column 'a' must hold numbers"):
        rows(path)
    pq.write_table(pa.table({"a": [[1, None]]}), path)
    with pytest.raises(ValueError, match="row 0: 'a' must be"):
        rows(path)
    pq.write_table(pa.table({"a": pa.array([2**63], pa.uint64())}), path)
    with pytest.raises(ValueError, match="row 0: 'a' must fit 64 bits"):
        rows(path)


def idx(*shape: int, data: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">I", n) for n in shape) + data


BAD_ARRAYS = {
    "idx without all values": ("a", idx(3, 2, data=b"12345"), "must hold 6 bytes of values"),
    "idx with more": ("a", idx(2, data=b"123"), "must hold 2 bytes of values"),
    "idx within its header": ("a", idx(3, 2, data=b"")[:9], "ends within its header"),
    "idx of no kind": ("a", b"\0\0\7\1" + bytes(8), "does not begin as an IDX file"),
    "gzip that is cut": ("a.gz", gzip.compress(idx(2, data=b"12"))[:-3], "is damaged"),
    "hdf5 that is cut": ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "An input must be whole"),
    "npz that is cut": ("a.npz", b"PK\3\4" + bytes(40), "An input must be whole"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_arrays_that_are_refused(tmp_path, case):
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


@pytest.mark.parametrize(
    ("schema", "message"),
    [({}, "must name at least one"), ({"a": "int8"}, "`kind` must be one of")],
)
def test_wrong_schemas(schema, message):
    with pytest.raises(ValueError, match=message):
        Schema.from_json(schema)
