"""Checks that `tfdml records inspect` shows all of a data set, and only valid records."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tfdml.cli.records import app
from tfdml.data import write_tfrecords
from tfdml.data.check import inspection
from tfdml.data.format import manifest as manifests

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def inspect(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "120"})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.output


def picture(colour: tuple, width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(data, "PNG")
    return data.getvalue()


@pytest.fixture
def pictures(tmp_path) -> str:
    """Writes 12 images of one colour each, wide and high ones; 6, 4 and 2 of the colours."""
    labels = [0] * 6 + [1] * 4 + [2] * 2
    rows = [
        {"image": picture(COLOURS[c], 40 + 20 * (i % 2), 40), "label": c, "text": f"row [{i}]"}
        for i, c in enumerate(labels)
    ]
    schema = {
        "image": {"kind": "image"},
        "label": {"kind": "int64", "classes": ["red", "green", "blue"]},
        "text": "string",
    }
    write_tfrecords(rows, str(tmp_path / "set"), schema=schema, name="colours", shards=2)
    more = [{**row, "text": "of test"} for row in rows[:3]]
    write_tfrecords(more, str(tmp_path / "set"), schema=schema, name="colours", split="test")
    return str(tmp_path / "set")


def test_schema_counts_examples_and_balance(pictures):
    code, output = inspect(pictures, "--split", "train", "--examples", "2")
    assert code == 0
    cells = [re.split("[│┃]", line)[1:-1] for line in output.splitlines()]
    cells = [[cell.strip() for cell in row] for row in cells if row]
    assert ["test", "3", "1", "0.0"] in cells
    assert ["train", "12", "2", "0.0"] in cells
    assert ["image", "image", "[]", ""] in cells
    assert ["label", "int64", "[]", "3"] in cells
    assert [row for row in cells if row[0] in ("red", "green", "blue")] == [
        ["red", "6", "50.0"],
        ["green", "4", "33.3"],
        ["blue", "2", "16.7"],
    ]
    # Records alternate between the two shards.
    assert "text: 'row [0]'" in output
    assert "text: 'row [2]'" in output
    assert "row [1]" not in output
    assert re.search(r"image: \d+ bytes", output)


def test_the_first_split_is_the_default(pictures):
    _, output = inspect(pictures, "--examples", "1")
    assert "text: 'of test'" in output


def test_contact_sheet(pictures, tmp_path):
    sheet = tmp_path / "sheet.png"
    code, output = inspect(pictures, "--split", "train", "--sheet", str(sheet))
    assert code == 0
    assert f"12 images: {sheet}" in output
    image = Image.open(sheet)
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (960, 192))
    labels = [0, 0, 0, 1, 1, 2, 0, 0, 0, 1, 1, 2]
    for i, label in enumerate(labels):
        x, y = i % 10 * 96, i // 10 * 96
        assert image.getpixel((x + 20, y + 20)) == COLOURS[label]
        # Between the images, and in empty cells.
        assert image.getpixel((x, y)) == (255, 255, 255)
    assert image.getpixel((500, 150)) == (255, 255, 255)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3)])
def test_contact_sheet_of_arrays(tmp_path, shape):
    rows = ({"x": np.full(shape, 10 * i, np.uint8)} for i in range(3))
    manifest = write_tfrecords(rows, str(tmp_path))
    assert inspection.contact_sheet(manifest, "train", tmp_path / "sheet.png") == 3
    image = Image.open(tmp_path / "sheet.png")
    assert image.size == (960, 96)
    assert [image.getpixel((96 * i + 4, 4)) for i in range(3)] == [(10 * i,) * 3 for i in range(3)]


def test_classes_without_names_and_another_label(tmp_path):
    rows = ({"label": i % 2, "kind": i % 3, "x": 0.5} for i in range(6))
    manifest = write_tfrecords(rows, str(tmp_path))
    assert inspection.balance(manifest, "train") == {"0": 3, "1": 3}
    assert inspection.balance(manifest, "train", "kind") == {"0": 2, "1": 2, "2": 2}
    rows = ({"x": 0.5} for _ in range(3))
    manifest = write_tfrecords(rows, str(tmp_path / "plain"))
    assert inspection.balance(manifest, "train") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "none"], "`split` must be one of"),
        (["--label", "text"], "`label` must be a feature of one integer"),
        (["--label", "z"], "`label` must be a feature of one integer"),
    ],
)
def test_wrong_arguments(pictures, arguments, message):
    code, output = inspect(pictures, *arguments)
    assert code == 1
    assert message in output


def test_no_data_set_and_no_images(tmp_path):
    code, output = inspect(str(tmp_path))
    assert code == 1
    assert "`path` must be a manifest" in output
    write_tfrecords([{"x": 1}], str(tmp_path))
    code, output = inspect(str(tmp_path), "--sheet", str(tmp_path / "sheet.png"))
    assert code == 1
    assert "`sheet` must be of a data set with images" in output


def test_a_damaged_record_is_named(pictures):
    manifest = manifests.load(pictures)
    path = Path(manifest.path_of(manifest.splits["train"][0]))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    code, output = inspect(pictures, "--split", "train")
    assert code == 1
    assert f"{path}, record 0" in output.replace("\n", "")
    assert "tfdml records verify" in output
