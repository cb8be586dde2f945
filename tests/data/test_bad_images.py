"""Checks that malformed images are reported with the reason, or read by their actual format."""

import io
import os
import struct

import numpy as np
import pytest
from PIL import Image

from tests.data.opened import rows
from tfdml.data import read_tfrecords
from tfdml.data.format.images import ImageOptions, prepare
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions


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
def test_images_misread_by_tensorflow(name):
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
    manifest = convert(open_source([path]), str(tmp_path / "out"), ConversionOptions())
    assert manifest.counts["written"] == 3
    assert manifest.schema["label"].classes == ("cat", "dog")
    found = rows(tmp_path / "out")
    assert [int(row["label"]) for row in found] == [0, 1, 1]
    assert b"dog/a b\n\xff.png" in [row["file"] for row in found]


@pytest.mark.parametrize("case", ["empty class", "loop", "beside", "other file", "inside"])
def test_wrong_image_folders_are_refused(tmp_path, case):
    path = folder(tmp_path)
    inside = os.path.join(path, "cat")
    output = os.path.join(path, "out") if case == "inside" else str(tmp_path / "out")
    message = {
        "empty class": r"empty/ without images in .*skip them with --on-error skip",
        "loop": "links that lead in a circle",
        "beside": "1.png beside the class folders",
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
        convert(open_source([path], kind="images"), output, ConversionOptions())


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


@pytest.mark.parametrize("crop", ["resize", "random"])
def test_image_format_does_not_follow_the_file_extension(tmp_path, crop):
    """A PNG named .jpg: its bytes are kept, and TensorFlow detects the format from them."""
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "1.jpg").write_bytes(encoded(NOISE, "PNG"))
    convert(open_source([str(tmp_path / "in")]), str(tmp_path / "out"), ConversionOptions())
    pipeline = read_tfrecords(
        str(tmp_path / "out"), 1, features=["image"], image_size=(40, 60), crop=crop
    )
    (image,) = next(iter(pipeline))
    assert image.shape == (40, 60, 3)
    if crop == "resize":
        np.testing.assert_array_equal(image, np.asarray(NOISE))
