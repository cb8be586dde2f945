"""Checks how inputs are recognised: delimiters of CSV, directories, and what is beside images."""

import gzip

import numpy as np
import pytest
from PIL import Image

from tests.data.opened import rows
from tfdml.data.sources.opening import open_source
from tfdml.data.write.convert import convert
from tfdml.data.write.plan import ConversionOptions


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_the_delimiter_is_detected(tmp_path, delimiter):
    lines = [f'{i}{delimiter}"x{delimiter}, {i}"' for i in range(5)]
    (tmp_path / "a.csv").write_text(f"a{delimiter}b\n" + "\n".join(lines))
    assert rows(tmp_path / "a.csv")[1] == {"a": 1, "b": f"x{delimiter}, 1"}
    (notice,) = open_source([str(tmp_path / "a.csv")]).notices
    assert f"is read with the delimiter {delimiter!r}; --delimiter sets another" in notice


NOT_DETECTED = {
    "commas": ("a,b\n1,x;y\n2,x;y\n", ["a", "b"]),
    "one column": ("a\nx;y\nz\n", ["a"]),
    "given": ("a;b\n1;2\n", ["a;b"]),
}


@pytest.mark.parametrize("name", NOT_DETECTED)
def test_no_other_delimiter_is_detected(tmp_path, name):
    text, columns = NOT_DETECTED[name]
    (tmp_path / "a.csv").write_text(text)
    source = open_source([str(tmp_path / "a.csv")], delimiter="," if name == "given" else None)
    assert list(source.schema) == columns
    assert source.notices == ()


def test_tabs_of_tsv_need_no_notice(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\n1\t2\n")
    assert rows(tmp_path / "a.tsv") == [{"a": 1, "b": 2}]
    assert open_source([str(tmp_path / "a.tsv")]).notices == ()


def test_a_directory_of_one_kind_of_table_stands_for_its_files(tmp_path):
    directory = tmp_path / "tables"
    directory.mkdir()
    for i in range(3):
        (directory / f"{i}.csv").write_text(f"a\n{i}\n")
    assert rows(directory) == [{"a": 0}, {"a": 1}, {"a": 2}]


def test_idx_files_in_a_directory_need_names(tmp_path):
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x01\x05"))
    message = r"IDX files must be given by .* image=\S+train-images-idx3-ubyte.gz label=\S+labels"
    with pytest.raises(ValueError, match=message):
        open_source([str(tmp_path)])


@pytest.fixture
def photos(tmp_path) -> str:
    """Returns a folder with two classes, an empty one, and a file beside them."""
    for name in ("cat", "dog", "empty"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    for name in ("cat", "dog"):
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "1.png")
    (tmp_path / "photos" / "README.txt").write_text("about")
    return str(tmp_path / "photos")


def test_what_is_beside_the_images_is_refused_or_skipped(photos, tmp_path):
    message = "README.txt beside the class folders, empty/ without images in .* --on-error skip"
    with pytest.raises(ValueError, match=message):
        open_source([photos])
    source = open_source([photos], skip_strays=True)
    (notice,) = source.notices
    assert "README.txt beside the class folders, empty/ without images" in notice
    manifest = convert(source, str(tmp_path / "out"), ConversionOptions(on_error="skip"))
    assert manifest.counts["written"] == 2
    assert manifest.schema["label"].classes == ("cat", "dog")


def test_uint64_beyond_int64_is_refused_by_name(tmp_path):
    np.save(tmp_path / "u.npy", np.array([[1, 2**64 - 1]], "uint64"))
    with pytest.raises(ValueError, match=r"integers that fit int64, -2\^63 to 2\^63 - 1"):
        rows(tmp_path / "u.npy")
